/* The state file: reading it, and failing or hanging as it says. */
#include "state.h"

struct handle handles[GPUS][SLOTS + 1];
_Thread_local struct state state;
int initialised;
/* The file as it was read last by this thread. One with children in it is read every time. */
static _Thread_local struct stat seen;
static _Thread_local int has_children;

double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static const char *value(char **words, int count, const char *key) {
    size_t length = strlen(key);
    for (int i = 0; i < count; i++)
        if (!strncmp(words[i], key, length) && words[i][length] == '=') return words[i] + length + 1;
    return NULL;
}

static u64 whole(char **words, int count, const char *key, u64 otherwise) {
    const char *text = value(words, count, key);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

static double real(char **words, int count, const char *key, double otherwise) {
    const char *text = value(words, count, key);
    return text ? strtod(text, NULL) : otherwise;
}

static void copy(char *to, const char *from) { snprintf(to, TEXT, "%s", from); }

static void read_gpu(struct gpu *gpu, char **words, int count) {
    const char *uuid = value(words, count, "uuid"), *name = value(words, count, "name");
    gpu->present = 1;
    copy(gpu->uuid, uuid ? uuid : "GPU-00000000-0000-0000-0000-000000000000");
    copy(gpu->name, name ? name : "NVIDIA_Stand-in");
    for (char *c = gpu->name; *c; c++)
        if (*c == '_') *c = ' ';
    gpu->total = whole(words, count, "total", 16ULL << 30);
    gpu->used = whole(words, count, "used", 0);
    gpu->util = whole(words, count, "util", 0);
    gpu->memutil = whole(words, count, "memutil", 0);
    gpu->power = whole(words, count, "power", 100000);
    gpu->limit = whole(words, count, "limit", 300000);
    gpu->limit_min = whole(words, count, "limit_min", 100000);
    gpu->limit_max = whole(words, count, "limit_max", 400000);
    gpu->clock = whole(words, count, "clock", 1500);
    gpu->temp = whole(words, count, "temp", 50);
    gpu->mode = whole(words, count, "mode", 0);
    gpu->reasons = whole(words, count, "reasons", 0);
    gpu->reserved = whole(words, count, "reserved", 0);
    gpu->ecc = whole(words, count, "ecc", 0);
    gpu->remap_failed = whole(words, count, "remap_failed", 0);
    gpu->recovery = value(words, count, "recovery") ? (int)whole(words, count, "recovery", 0) : -1;
    gpu->gpm = whole(words, count, "gpm", 1);
    gpu->mig = whole(words, count, "mig", 0);
    gpu->island = whole(words, count, "island", 0);
    gpu->energy_rate = real(words, count, "energy_rate", gpu->power / 1000.0);
    gpu->tx_rate = real(words, count, "tx_rate", 0);
    gpu->rx_rate = real(words, count, "rx_rate", 0);
    gpu->nvlink_tx_rate = real(words, count, "nvlink_tx_rate", 0);
    gpu->nvlink_rx_rate = real(words, count, "nvlink_rx_rate", 0);
}

/* The driver samples every sixth of a second. */
u64 sampled_us(const struct process *process) {
    return process->time_us ? process->time_us : (u64)(now_s() * 6) * 1000000 / 6;
}

static void add_process(struct gpu *gpu, char **words, int count, unsigned pid) {
    if (gpu->process_count == PROCESSES) return;
    struct process *process = &gpu->processes[gpu->process_count++];
    const char *list = value(words, count, "list");
    process->pid = pid;
    process->sm = whole(words, count, "sm", 0);
    process->mem = whole(words, count, "mem", 0);
    process->memory = whole(words, count, "memory", 0);
    process->time_us = whole(words, count, "time", 0);
    process->slot = value(words, count, "instance") ? (int)whole(words, count, "instance", 0) : -1;
    process->compute = !list || !strcmp(list, "compute") || !strcmp(list, "both");
    process->mps = list && (!strcmp(list, "mps") || !strcmp(list, "both"));
}

/* Every child of the calling process, so that a program can be run whose process numbers nobody knows beforehand.
 * The kernel lists children under the thread that started them. */
static void add_children(struct gpu *gpu, char **words, int count) {
    DIR *threads = opendir("/proc/self/task");
    struct dirent *thread;
    while (threads && (thread = readdir(threads))) {
        char path[300];
        unsigned pid;
        snprintf(path, sizeof path, "/proc/self/task/%s/children", thread->d_name);
        FILE *file = thread->d_name[0] == '.' ? NULL : fopen(path, "r");
        while (file && fscanf(file, "%u", &pid) == 1) add_process(gpu, words, count, pid);
        if (file) fclose(file);
    }
    if (threads) closedir(threads);
}

static void add_trouble(char **words, int count, int hang) {
    if (state.trouble_count == TROUBLES || count < 2) return;
    struct trouble *trouble = &state.troubles[state.trouble_count++];
    int at = hang ? 2 : 3;
    copy(trouble->function, words[1]);
    trouble->hang = hang;
    trouble->rc = hang ? 0 : atoi(count > 2 ? words[2] : "999");
    trouble->gpu = count > at ? atoi(words[at]) : -1;
}

static void read_line(char **words, int count) {
    int index = count > 1 ? atoi(words[1]) : 0;
    struct gpu *gpu = &state.gpus[index >= 0 && index < GPUS ? index : 0];
    if (!strcmp(words[0], "driver")) copy(state.driver, words[1]);
    else if (!strcmp(words[0], "cuda")) state.cuda = index;
    else if (!strcmp(words[0], "gpu")) read_gpu(gpu, words, count);
    else if (!strcmp(words[0], "process")) add_process(gpu, words, count, (unsigned)whole(words, count, "pid", 0));
    else if (!strcmp(words[0], "children")) has_children = 1, add_children(gpu, words, count);
    else if (!strcmp(words[0], "fault")) add_trouble(words, count, 0);
    else if (!strcmp(words[0], "hang")) add_trouble(words, count, 1);
    else if (!strcmp(words[0], "xid") && count > 2) gpu->xid = strtoull(words[2], NULL, 10);
    else if (!strcmp(words[0], "metric") && count > 3 && gpu->metric_count < METRICS)
        gpu->metrics[gpu->metric_count++] =
            (struct metric){(unsigned)atoi(words[2]), strtod(words[3], NULL), count > 4 ? atoi(words[4]) : 0};
    else if (!strcmp(words[0], "instance") && count > 3 && atoi(words[2]) < SLOTS) {
        struct instance *instance = &gpu->instances[atoi(words[2])];
        const char *name = value(words, count, "name");
        copy(instance->uuid, words[3]);
        copy(instance->name, name ? name : gpu->name);
        for (char *c = instance->name; *c; c++)
            if (*c == '_') *c = ' ';
        instance->gpu_instance = (int)whole(words, count, "gi", (u64)atoi(words[2]) + 1);
        instance->compute_instance = (int)whole(words, count, "ci", 0);
        instance->total = whole(words, count, "total", 4ULL << 30);
        instance->used = whole(words, count, "used", 0);
    }
}

static int unchanged(const struct stat *now) {
    return !has_children && now->st_ino == seen.st_ino && now->st_size == seen.st_size && now->st_ino &&
           now->st_mtim.tv_sec == seen.st_mtim.tv_sec && now->st_mtim.tv_nsec == seen.st_mtim.tv_nsec;
}

static void read_state(void) {
    char line[1024], *words[32], *rest;
    const char *path = getenv("NVML_STANDIN_STATE");
    struct stat now = {0};
    if (path && !stat(path, &now) && unchanged(&now)) return;
    seen = now;
    has_children = 0;
    FILE *file = path ? fopen(path, "r") : NULL;
    memset(&state, 0, sizeof state);
    copy(state.driver, "580.00.00");
    state.cuda = 13000;
    while (file && fgets(line, sizeof line, file)) {
        int count = 0;
        for (char *word = strtok_r(line, " \t\n", &rest); word && count < 32; word = strtok_r(NULL, " \t\n", &rest))
            words[count++] = word;
        if (count > 1 && words[0][0] != '#') read_line(words, count);
    }
    if (file) fclose(file);
    while (state.gpu_count < GPUS && state.gpus[state.gpu_count].present) state.gpu_count++;
    for (int gpu = 0; gpu < GPUS; gpu++)
        for (int slot = 0; slot <= SLOTS; slot++) handles[gpu][slot] = (struct handle){gpu, slot - 1};
}

/* "*" means every function of a device. */
static struct trouble *find_trouble(const char *function, int gpu) {
    for (int i = 0; i < state.trouble_count; i++) {
        struct trouble *trouble = &state.troubles[i];
        int every = !strcmp(trouble->function, "*") && gpu >= 0;
        if ((every || !strcmp(trouble->function, function)) && (trouble->gpu < 0 || trouble->gpu == gpu)) return trouble;
    }
    return NULL;
}

/* Reads the state, then fails, or does not return while the file says so. */
nvmlReturn_t enter(const char *function, nvmlDevice_t device) {
    int gpu = device ? device->gpu : -1;
    struct trouble *trouble;
    read_state();
    while ((trouble = find_trouble(function, gpu)) && trouble->hang) {
        usleep(10000);
        read_state();
    }
    if (trouble) return trouble->rc;
    if (device && !state.gpus[gpu].present) return INVALID;
    if (device && device->slot >= 0 && !state.gpus[gpu].instances[device->slot].uuid[0]) return NOT_FOUND;
    return SUCCESS;
}
