/* What the parts of the stand-in share: the "hardware" as the state file describes it, and the entry to every call. */
#define _GNU_SOURCE
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int nvmlReturn_t;
typedef unsigned long long u64;
enum { SUCCESS, UNINITIALIZED, INVALID, NOT_SUPPORTED, NO_PERMISSION, ALREADY, NOT_FOUND, TOO_SMALL, TIMEOUT = 10 };
enum { GPUS = 8, SLOTS = 8, PROCESSES = 64, METRICS = 32, TROUBLES = 32, TEXT = 96 };

struct process { unsigned pid, sm, mem; u64 memory, time_us; int compute, mps, slot; };
struct metric { unsigned id; double value; int rc; };
struct instance { char uuid[TEXT], name[TEXT]; u64 total, used; int gpu_instance, compute_instance; };
struct gpu {
    int present, gpm, mig, island, process_count, metric_count; /* island 0: no NVLink */
    char uuid[TEXT], name[TEXT];
    u64 total, used, reserved, reasons, xid, ecc, remap_failed;
    unsigned util, memutil, power, limit, limit_min, limit_max, clock, temp, mode;
    int recovery; /* -1: the driver does not tell */
    double energy_rate, tx_rate, rx_rate, nvlink_tx_rate, nvlink_rx_rate;
    struct process processes[PROCESSES];
    struct metric metrics[METRICS];
    struct instance instances[SLOTS];
};
struct trouble { char function[TEXT]; int rc, hang, gpu; };
struct state {
    char driver[TEXT];
    int cuda, gpu_count, trouble_count;
    struct gpu gpus[GPUS];
    struct trouble troubles[TROUBLES];
};
/* A handle is the address of one of these: gpu, and the slot of a MIG instance or -1. */
struct handle { int gpu, slot; };
typedef struct handle *nvmlDevice_t;


extern struct handle handles[GPUS][SLOTS + 1];
extern _Thread_local struct state state;
extern int initialised;

double now_s(void);
u64 sampled_us(const struct process *process);
nvmlReturn_t enter(const char *function, nvmlDevice_t device);

#define ENTER(device) \
    do { \
        nvmlReturn_t rc = initialised ? enter(__func__, device) : UNINITIALIZED; \
        if (rc) return rc; \
    } while (0)
#define GPU(device) (&state.gpus[(device)->gpu])
