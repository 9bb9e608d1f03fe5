/* A stand-in for NVIDIA's management library, for tests without a GPU.
 *
 * It exports what nvidia-ml-py calls, keeps the layout of NVML's structures, and answers from a small text file that
 * is looked at on every call, so that a test can change the "hardware" while a program runs. The file's path is in
 * the environment variable NVML_STANDIN_STATE; tests/nvml_standin/README.md describes its lines.
 */
#include "state.h"

/* --- library and system --------------------------------------------------------------------------------------- */

nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    nvmlReturn_t rc = enter("nvmlInit", NULL);
    if (!rc) initialised++;
    return rc;
}
nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
nvmlReturn_t nvmlShutdown(void) {
    ENTER(NULL);
    initialised--;
    return SUCCESS;
}
const char *nvmlErrorString(nvmlReturn_t rc) {
    (void)rc;
    return "an error of the stand-in";
}
static nvmlReturn_t text(char *to, unsigned length, const char *from) {
    if (strlen(from) >= length) return TOO_SMALL;
    strcpy(to, from);
    return SUCCESS;
}
nvmlReturn_t nvmlSystemGetDriverVersion(char *to, unsigned length) {
    ENTER(NULL);
    return text(to, length, state.driver);
}
nvmlReturn_t nvmlSystemGetNVMLVersion(char *to, unsigned length) {
    ENTER(NULL);
    return text(to, length, "13.0");
}
nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    ENTER(NULL);
    *version = state.cuda;
    return SUCCESS;
}
nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

/* --- devices -------------------------------------------------------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER(NULL);
    *count = (unsigned)state.gpu_count;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    ENTER(NULL);
    if (index >= (unsigned)state.gpu_count) return INVALID;
    *device = &handles[index][0];
    return enter(__func__, *device);
}
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    ENTER(NULL);
    for (int gpu = 0; gpu < state.gpu_count; gpu++) {
        if (!strcmp(uuid, state.gpus[gpu].uuid)) *device = &handles[gpu][0];
        else {
            int slot = 0;
            while (slot < SLOTS && strcmp(uuid, state.gpus[gpu].instances[slot].uuid)) slot++;
            if (slot == SLOTS || !uuid[0]) continue;
            *device = &handles[gpu][slot + 1];
        }
        return enter(__func__, *device);
    }
    return NOT_FOUND;
}
nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) {
    ENTER(device);
    *index = (unsigned)(device->slot < 0 ? device->gpu : device->slot);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *minor) {
    ENTER(device);
    *minor = (unsigned)device->gpu;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *to, unsigned length) {
    ENTER(device);
    return text(to, length, device->slot < 0 ? GPU(device)->name : GPU(device)->instances[device->slot].name);
}
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *to, unsigned length) {
    ENTER(device);
    return text(to, length, device->slot < 0 ? GPU(device)->uuid : GPU(device)->instances[device->slot].uuid);
}
nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    ENTER(device);
    *major = 9;
    *minor = 0;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, unsigned *mode) {
    ENTER(device);
    *mode = GPU(device)->mode;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, unsigned *on) {
    ENTER(device);
    *on = 1;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t device, nvmlDevice_t other, unsigned what, unsigned *status) {
    ENTER(device);
    ENTER(other);
    if (what != 2) return NOT_SUPPORTED; /* all but NVLink */
    *status = GPU(device)->island && GPU(device)->island == GPU(other)->island ? 0 : 5;
    return SUCCESS;
}

/* --- MIG ------------------------------------------------------------------------------------------------------ */

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    ENTER(device);
    *current = *pending = (unsigned)GPU(device)->mig;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count) {
    ENTER(device);
    *count = GPU(device)->mig ? SLOTS - 1 : 0;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *instance) {
    ENTER(device);
    if (index >= SLOTS) return INVALID;
    if (!GPU(device)->mig || !GPU(device)->instances[index].uuid[0]) return NOT_FOUND;
    *instance = &handles[device->gpu][index + 1];
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t instance, unsigned *id) {
    ENTER(instance);
    if (instance->slot < 0) return INVALID;
    *id = (unsigned)GPU(instance)->instances[instance->slot].gpu_instance;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t instance, unsigned *id) {
    ENTER(instance);
    if (instance->slot < 0) return INVALID;
    *id = (unsigned)GPU(instance)->instances[instance->slot].compute_instance;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is) {
    ENTER(device);
    *is = device->slot >= 0;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t instance, nvmlDevice_t *device) {
    ENTER(instance);
    *device = &handles[instance->gpu][0];
    return SUCCESS;
}

/* --- readings of the device ----------------------------------------------------------------------------------- */

struct memory { u64 total, free, used; };
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, struct memory *memory) {
    ENTER(device);
    struct gpu *gpu = GPU(device);
    memory->total = device->slot < 0 ? gpu->total : gpu->instances[device->slot].total;
    memory->used = device->slot < 0 ? gpu->used : gpu->instances[device->slot].used;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}
struct memory_v2 { unsigned version; u64 total, reserved, free, used; };
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, struct memory_v2 *memory) {
    struct memory plain;
    nvmlReturn_t rc = nvmlDeviceGetMemoryInfo(device, &plain);
    if (!rc) *memory = (struct memory_v2){memory->version, plain.total, GPU(device)->reserved, plain.free, plain.used};
    return rc;
}
struct utilization { unsigned gpu, memory; };
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, struct utilization *rates) {
    ENTER(device);
    if (device->slot >= 0) return NOT_SUPPORTED;
    *rates = (struct utilization){GPU(device)->util, GPU(device)->memutil};
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *milliwatts) {
    ENTER(device);
    *milliwatts = GPU(device)->power;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, u64 *millijoules) {
    ENTER(device);
    *millijoules = (u64)(now_s() * GPU(device)->energy_rate * 1000);
    return SUCCESS;
}
/* What this process has set; the state file, which is the hardware, does not change. */
static unsigned limits[GPUS];
nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned *milliwatts) {
    ENTER(device);
    *milliwatts = limits[device->gpu] ? limits[device->gpu] : GPU(device)->limit;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned *milliwatts) {
    ENTER(device);
    *milliwatts = GPU(device)->limit;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned *low, unsigned *high) {
    ENTER(device);
    *low = GPU(device)->limit_min;
    *high = GPU(device)->limit_max;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceSetPowerManagementLimit(nvmlDevice_t device, unsigned milliwatts) {
    ENTER(device);
    if (milliwatts < GPU(device)->limit_min || milliwatts > GPU(device)->limit_max) return INVALID;
    limits[device->gpu] = milliwatts;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned type, unsigned *mhz) {
    (void)type;
    ENTER(device);
    *mhz = GPU(device)->clock;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned type, unsigned *mhz) {
    (void)type;
    ENTER(device);
    *mhz = GPU(device)->clock;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *celsius) {
    (void)sensor;
    ENTER(device);
    *celsius = GPU(device)->temp;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, u64 *reasons) {
    ENTER(device);
    *reasons = GPU(device)->reasons;
    return SUCCESS;
}
union number { double d; unsigned ui; unsigned long ul; u64 ull; long long sll; };
struct field {
    unsigned id, scope;
    long long timestamp, latency_us;
    unsigned type;
    nvmlReturn_t rc;
    union number value;
};
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, struct field *fields) {
    ENTER(device);
    for (int i = 0; i < count; i++) {
        struct field *field = &fields[i];
        struct gpu *gpu = GPU(device);
        field->rc = SUCCESS;
        field->type = 3; /* unsigned long long */
        field->timestamp = (long long)(now_s() * 1e6);
        switch (field->id) {
        case 197: field->value.ull = (u64)(now_s() * gpu->tx_rate); break; /* PCIe bytes sent by the GPU */
        case 198: field->value.ull = (u64)(now_s() * gpu->rx_rate); break; /* and received */
        case 138: field->value.ull = (u64)(now_s() * gpu->nvlink_tx_rate / 1024); break; /* NVLink KiB */
        case 139: field->value.ull = (u64)(now_s() * gpu->nvlink_rx_rate / 1024); break;
        case 4: field->value.ull = gpu->ecc; break; /* double-bit errors */
        case 145: field->value.ull = gpu->remap_failed; break;
        case 230: /* recovery action */
            if (gpu->recovery >= 0) field->value.ull = (u64)gpu->recovery;
            else field->rc = NOT_SUPPORTED;
            break;
        default: field->rc = NOT_SUPPORTED;
        }
    }
    return SUCCESS;
}

/* --- processes ------------------------------------------------------------------------------------------------ */

struct process_info { unsigned pid; u64 memory; unsigned gpu_instance, compute_instance; };
static nvmlReturn_t processes(nvmlDevice_t device, int mps, unsigned *count, struct process_info *infos) {
    struct gpu *gpu = GPU(device);
    unsigned found = 0, room = infos ? *count : 0;
    for (int i = 0; i < gpu->process_count; i++) {
        struct process *process = &gpu->processes[i];
        if (mps ? !process->mps : !process->compute) continue;
        if (device->slot >= 0 && process->slot != device->slot) continue;
        if (found < room) infos[found] = (struct process_info){process->pid, process->memory, ~0U, ~0U};
        found++;
    }
    *count = found;
    return found > room ? TOO_SMALL : SUCCESS;
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(
    nvmlDevice_t device, unsigned *count, struct process_info *infos) {
    ENTER(device);
    return processes(device, 0, count, infos);
}
nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(
    nvmlDevice_t device, unsigned *count, struct process_info *infos) {
    ENTER(device);
    return processes(device, 1, count, infos);
}
nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(
    nvmlDevice_t device, unsigned *count, struct process_info *infos) {
    (void)infos;
    ENTER(device);
    *count = 0;
    return SUCCESS;
}
struct process_sample { unsigned pid; u64 time_us; unsigned sm, mem, enc, dec; };
nvmlReturn_t nvmlDeviceGetProcessUtilization(
    nvmlDevice_t device, struct process_sample *samples, unsigned *count, u64 seen) {
    ENTER(device);
    struct gpu *gpu = GPU(device);
    unsigned found = 0, room = samples ? *count : 0;
    if (device->slot >= 0) return NOT_SUPPORTED;
    for (int i = 0; i < gpu->process_count; i++) {
        struct process *process = &gpu->processes[i];
        u64 at = sampled_us(process);
        if (!process->sm || at <= seen) continue;
        if (found < room) samples[found] = (struct process_sample){process->pid, at, process->sm, process->mem, 0, 0};
        found++;
    }
    *count = found;
    if (!found) return NOT_FOUND;
    return found > room ? TOO_SMALL : SUCCESS;
}

/* --- performance counters (GPM) ------------------------------------------------------------------------------- */

struct gpm_sample { double at_s; int gpu; };
struct gpm_metric { unsigned id; nvmlReturn_t rc; double value; const char *names[3]; };
struct gpm_get { unsigned version, count; struct gpm_sample *one, *two; struct gpm_metric metrics[]; };
struct gpm_support { unsigned version, supported; };

nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, struct gpm_support *support) {
    ENTER(device);
    support->supported = (unsigned)GPU(device)->gpm;
    return SUCCESS;
}
nvmlReturn_t nvmlGpmSampleAlloc(struct gpm_sample **sample) {
    ENTER(NULL);
    *sample = calloc(1, sizeof **sample);
    return SUCCESS;
}
nvmlReturn_t nvmlGpmSampleFree(struct gpm_sample *sample) {
    ENTER(NULL);
    free(sample);
    return SUCCESS;
}
nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, struct gpm_sample *sample) {
    ENTER(device);
    if (!GPU(device)->gpm) return NOT_SUPPORTED;
    *sample = (struct gpm_sample){now_s(), device->gpu};
    return SUCCESS;
}
nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned gpu_instance, struct gpm_sample *sample) {
    (void)gpu_instance;
    return nvmlGpmSampleGet(device, sample);
}
nvmlReturn_t nvmlGpmMetricsGet(struct gpm_get *get) {
    ENTER(NULL);
    struct gpu *gpu = &state.gpus[get->two->gpu];
    if (get->two->at_s - get->one->at_s < 0.1) return INVALID;
    for (unsigned i = 0; i < get->count; i++) {
        struct gpm_metric *metric = &get->metrics[i];
        metric->rc = NOT_SUPPORTED;
        for (int k = 0; k < gpu->metric_count; k++)
            if (gpu->metrics[k].id == metric->id) {
                metric->rc = gpu->metrics[k].rc;
                metric->value = gpu->metrics[k].value;
            }
    }
    return SUCCESS;
}

/* --- events (XID) --------------------------------------------------------------------------------------------- */

struct event_set { nvmlDevice_t device; };
struct event { nvmlDevice_t device; u64 type, data; unsigned gpu_instance, compute_instance; };

nvmlReturn_t nvmlEventSetCreate(struct event_set **set) {
    ENTER(NULL);
    *set = calloc(1, sizeof **set);
    return SUCCESS;
}
nvmlReturn_t nvmlEventSetFree(struct event_set *set) {
    ENTER(NULL);
    free(set);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, u64 types, struct event_set *set) {
    (void)types;
    ENTER(device);
    set->device = device;
    return SUCCESS;
}
nvmlReturn_t nvmlEventSetWait_v2(struct event_set *set, struct event *event, unsigned timeout_ms) {
    (void)timeout_ms;
    ENTER(set->device);
    if (!set->device || !GPU(set->device)->xid) return TIMEOUT;
    *event = (struct event){set->device, 8, GPU(set->device)->xid, ~0U, ~0U};
    return SUCCESS;
}
