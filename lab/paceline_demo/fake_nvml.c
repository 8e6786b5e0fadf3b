/* A libnvidia-ml.so.1 for machines without a driver.
 *
 * It answers the calls the nvml collector and the emulated trainer make through pynvml, from a
 * memory-mapped file (PACELINE_FAKE_NVML_STATE) that is read at each call, so that what a fault
 * writes there shows at once. The layout of the file, struct state, is generated from
 * fake_nvml.py into the header below. Numbers are those of NVML's public API. Defaults of the
 * state are of an H200.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "fake_nvml_state.h"

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
    UNKNOWN = 999,
};
enum { CLOCK_SM = 1, CLOCK_MEMORY = 2, CLOCK_VIDEO = 3 };
enum { VALUE_UNSIGNED_INT = 1, VALUE_UNSIGNED_LONG_LONG = 3, VALUE_SIGNED_INT = 5 };

/* index + 1, and for a MIG device its number + 1 above that */
typedef struct handle *device;
#define MIG_SHIFT 8
#define MIG_MOST 7
#define EXPORT __attribute__((visibility("default")))

static volatile struct state *state;
static int initialized;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t milliseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static int map_state(void)
{
    const char *path = getenv("PACELINE_FAKE_NVML_STATE");
    struct stat status;
    void *mapped;
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0)
        return DRIVER_NOT_LOADED;
    if (fstat(file, &status) != 0 || status.st_size < (off_t)sizeof(struct state)) {
        close(file);
        return DRIVER_NOT_LOADED;
    }
    mapped = mmap(NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED)
        return DRIVER_NOT_LOADED;
    state = mapped;
    if (state->magic != STATE_MAGIC || state->version != STATE_VERSION) {
        munmap(mapped, sizeof(struct state));
        state = NULL;
        return DRIVER_NOT_LOADED;
    }
    if (state->driver_unloaded) {
        munmap(mapped, sizeof(struct state));
        state = NULL;
        return DRIVER_NOT_LOADED;
    }
    return SUCCESS;
}

EXPORT int nvmlInitWithFlags(unsigned int flags)
{
    int result = SUCCESS;
    (void)flags;
    pthread_mutex_lock(&lock);
    if (!initialized)
        result = map_state();
    if (result == SUCCESS)
        initialized++;
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

EXPORT int nvmlShutdown(void)
{
    int result = SUCCESS;
    pthread_mutex_lock(&lock);
    if (!initialized) {
        result = UNINITIALIZED;
    } else if (--initialized == 0) {
        munmap((void *)state, sizeof(struct state));
        state = NULL;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT const char *nvmlErrorString(int result)
{
    switch (result) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case TIMEOUT: return "Timeout";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

/* As a sick GPU does: hold the caller until the fault is taken back or its time is over. */
static void hang(volatile struct gpu *gpu)
{
    uint64_t started = milliseconds();
    while (gpu->hang_seconds > 0 && milliseconds() - started < gpu->hang_seconds * 1000)
        usleep(10000);
}

static int reach(device handle, volatile struct gpu **gpu)
{
    uintptr_t number = (uintptr_t)handle & ((1u << MIG_SHIFT) - 1);
    if (!state)
        return UNINITIALIZED;
    if (number < 1 || number > state->gpu_count)
        return INVALID_ARGUMENT;
    *gpu = &state->gpus[number - 1];
    hang(*gpu);
    if (state->driver_unloaded)
        return UNKNOWN;
    if ((*gpu)->error)
        return (int)(*gpu)->error;
    return (*gpu)->lost ? GPU_IS_LOST : SUCCESS;
}

static unsigned int mig_number(device handle) /* 0: the whole GPU */
{
    return (unsigned int)((uintptr_t)handle >> MIG_SHIFT);
}

#define REACH(handle)                       \
    volatile struct gpu *gpu;               \
    int reached = reach(handle, &gpu);      \
    if (reached != SUCCESS)                 \
        return reached

/* SUCCESS, or how this GPU answers calls of that sort. */
static int able(volatile struct gpu *gpu, uint64_t call)
{
    if ((gpu->unsupported | gpu->denied) & call)
        gpu->refused++;
    if (gpu->unsupported & call)
        return NOT_SUPPORTED;
    if (gpu->denied & call)
        return NO_PERMISSION;
    return gpu->failing & call ? UNKNOWN : SUCCESS;
}

#define ABLE(call)                \
    int answer = able(gpu, call); \
    if (answer != SUCCESS)        \
        return answer

static void copy_text(char *to, unsigned int size, const volatile char *from)
{
    snprintf(to, size, "%s", (const char *)from);
}

/* The system and its devices. */

EXPORT int nvmlSystemGetDriverVersion(char *version, unsigned int size)
{
    if (!state)
        return UNINITIALIZED;
    copy_text(version, size, state->driver_version);
    return SUCCESS;
}

EXPORT int nvmlSystemGetNVMLVersion(char *version, unsigned int size)
{
    if (!state)
        return UNINITIALIZED;
    snprintf(version, size, "%d.%s", state->cuda_version / 1000, (const char *)state->driver_version);
    return SUCCESS;
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    if (!state)
        return UNINITIALIZED;
    *version = (int)state->cuda_version;
    return SUCCESS;
}

EXPORT int nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

EXPORT int nvmlDeviceGetCount_v2(unsigned int *count)
{
    if (!state)
        return UNINITIALIZED;
    *count = state->gpu_count;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned int index, device *handle)
{
    if (!state)
        return UNINITIALIZED;
    if (index >= state->gpu_count)
        return INVALID_ARGUMENT;
    volatile struct gpu *gpu = &state->gpus[index];
    ABLE(CALL_HANDLE);
    *handle = (device)(uintptr_t)(index + 1);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetIndex(device handle, unsigned int *index)
{
    REACH(handle);
    *index = (unsigned int)(gpu - state->gpus);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMinorNumber(device handle, unsigned int *minor)
{
    return nvmlDeviceGetIndex(handle, minor);
}

EXPORT int nvmlDeviceGetName(device handle, char *name, unsigned int size)
{
    REACH(handle);
    copy_text(name, size, gpu->name);
    if (mig_number(handle))
        snprintf(name, size, "%s MIG 1g.%ugb", (const char *)gpu->name,
                 (unsigned int)(((gpu->memory_total_bytes >> 20) / 8 + 512) / 1024));
    return SUCCESS;
}

EXPORT int nvmlDeviceGetUUID(device handle, char *uuid, unsigned int size)
{
    REACH(handle);
    copy_text(uuid, size, gpu->uuid);
    if (mig_number(handle))
        snprintf(uuid, size, "MIG-%u%s", mig_number(handle), (const char *)gpu->uuid + 5);
    return SUCCESS;
}

struct pci_info {
    char bus_id_legacy[16];
    unsigned int domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
};

EXPORT int nvmlDeviceGetPciInfo_v3(device handle, struct pci_info *info)
{
    REACH(handle);
    memset(info, 0, sizeof(*info));
    copy_text(info->bus_id, sizeof(info->bus_id), gpu->pci_bus_id);
    copy_text(info->bus_id_legacy, sizeof(info->bus_id_legacy), gpu->pci_bus_id + 4);
    sscanf(info->bus_id, "%x:%x:%x", &info->domain, &info->bus, &info->device);
    info->pci_device_id = gpu->pci_device_id;
    return SUCCESS;
}

/* What changes. */

#define ALWAYS 0
#define NUMBER(function, field, call)                       \
    EXPORT int function(device handle, unsigned int *value) \
    {                                                       \
        REACH(handle);                                      \
        ABLE(call);                                         \
        *value = gpu->field;                                \
        return SUCCESS;                                     \
    }

NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, pcie_generation, ALWAYS)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, pcie_generation_max, ALWAYS)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, pcie_width, ALWAYS)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, pcie_width_max, ALWAYS)
NUMBER(nvmlDeviceGetPcieReplayCounter, pcie_replays, ALWAYS)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, power_limit_milliwatts, CALL_POWER_LIMITS)
NUMBER(nvmlDeviceGetPowerManagementLimit, power_limit_milliwatts, CALL_POWER_LIMITS)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, power_limit_default_milliwatts, CALL_POWER_LIMITS)
NUMBER(nvmlDeviceGetPersistenceMode, persistence_mode, CALL_PERSISTENCE)
NUMBER(nvmlDeviceGetPowerUsage, power_milliwatts, CALL_POWER)

EXPORT int nvmlDeviceGetVbiosVersion(device handle, char *version, unsigned int size)
{
    REACH(handle);
    ABLE(CALL_VBIOS);
    copy_text(version, size, gpu->vbios);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetPowerManagementLimitConstraints(
    device handle, unsigned int *minimum, unsigned int *maximum)
{
    REACH(handle);
    ABLE(CALL_POWER_LIMITS);
    *minimum = gpu->power_limit_minimum_milliwatts;
    *maximum = gpu->power_limit_maximum_milliwatts;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetEccMode(device handle, unsigned int *current, unsigned int *pending)
{
    REACH(handle);
    ABLE(CALL_ECC);
    *current = gpu->ecc_mode;
    *pending = gpu->ecc_mode_pending;
    return SUCCESS;
}

/* The real one samples for 20 ms. */
EXPORT int nvmlDeviceGetPcieThroughput(device handle, unsigned int counter, unsigned int *value)
{
    REACH(handle);
    ABLE(CALL_PCIE_THROUGHPUT);
    *value = counter ? gpu->pcie_received_kb_per_second : gpu->pcie_transmitted_kb_per_second;
    return SUCCESS;
}

static int engine(device handle, unsigned int *value, unsigned int *period_us, int decoder)
{
    REACH(handle);
    ABLE(CALL_ENCODER);
    *value = decoder ? gpu->decoder_percent : gpu->encoder_percent;
    *period_us = 100000;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetEncoderUtilization(device handle, unsigned int *value, unsigned int *period)
{
    return engine(handle, value, period, 0);
}

EXPORT int nvmlDeviceGetDecoderUtilization(device handle, unsigned int *value, unsigned int *period)
{
    return engine(handle, value, period, 1);
}

static int clock_of(device handle, unsigned int type, unsigned int *value, int maximum)
{
    REACH(handle);
    if (type == CLOCK_MEMORY)
        *value = maximum ? gpu->memory_clock_max_mhz : gpu->memory_clock_mhz;
    else if (type <= CLOCK_SM)
        *value = maximum ? gpu->sm_clock_max_mhz : gpu->sm_clock_mhz;
    else if (type != CLOCK_VIDEO)
        return INVALID_ARGUMENT;
    else {
        ABLE(CALL_VIDEO_CLOCK);
        *value = maximum ? gpu->video_clock_max_mhz : gpu->video_clock_mhz;
    }
    return SUCCESS;
}

EXPORT int nvmlDeviceGetClockInfo(device handle, unsigned int type, unsigned int *value)
{
    return clock_of(handle, type, value, 0);
}

EXPORT int nvmlDeviceGetMaxClockInfo(device handle, unsigned int type, unsigned int *value)
{
    return clock_of(handle, type, value, 1);
}

EXPORT int nvmlDeviceGetCurrentClocksEventReasons(device handle, unsigned long long *reasons)
{
    REACH(handle);
    *reasons = gpu->throttle_reasons;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(device handle, unsigned long long *reasons)
{
    return nvmlDeviceGetCurrentClocksEventReasons(handle, reasons);
}

static uint64_t energy_millijoules(volatile struct gpu *gpu)
{
    uint64_t grown = (uint64_t)gpu->power_milliwatts * milliseconds() / 1000;
    return gpu->energy_millijoules + (gpu->clock_stopped ? 0 : grown);
}

EXPORT int nvmlDeviceGetTotalEnergyConsumption(device handle, unsigned long long *millijoules)
{
    REACH(handle);
    ABLE(CALL_ENERGY);
    *millijoules = energy_millijoules(gpu);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetTemperature(device handle, unsigned int sensor, unsigned int *celsius)
{
    REACH(handle);
    if (sensor != 0)
        return INVALID_ARGUMENT;
    *celsius = gpu->temperature_celsius;
    return SUCCESS;
}

struct temperature {
    unsigned int version, sensor;
    int celsius;
};

EXPORT int nvmlDeviceGetTemperatureV(device handle, struct temperature *temperature)
{
    return nvmlDeviceGetTemperature(
        handle, temperature->sensor, (unsigned int *)&temperature->celsius);
}

EXPORT int nvmlDeviceGetTemperatureThreshold(
    device handle, unsigned int threshold, unsigned int *celsius)
{
    REACH(handle);
    ABLE(CALL_THRESHOLDS);
    switch (threshold) {
    case 0: *celsius = gpu->shutdown_celsius; return SUCCESS;
    case 1: *celsius = gpu->slowdown_celsius; return SUCCESS;
    case 2: *celsius = gpu->memory_maximum_celsius; return able(gpu, CALL_MEMORY_TEMPERATURE);
    case 3: *celsius = gpu->maximum_celsius; return SUCCESS;
    default: return NOT_SUPPORTED;
    }
}

struct margin {
    unsigned int version;
    int celsius;
};

EXPORT int nvmlDeviceGetMarginTemperature(device handle, struct margin *margin)
{
    REACH(handle);
    ABLE(CALL_MARGINS);
    margin->celsius = (int)gpu->maximum_celsius - (int)gpu->temperature_celsius;
    return SUCCESS;
}

struct utilization {
    unsigned int gpu, memory;
};

EXPORT int nvmlDeviceGetUtilizationRates(device handle, struct utilization *utilization)
{
    REACH(handle);
    if (gpu->mig_mode)
        return NOT_SUPPORTED;
    ABLE(CALL_UTILIZATION);
    utilization->gpu = gpu->utilization_percent;
    utilization->memory = gpu->memory_utilization_percent;
    return SUCCESS;
}

struct memory {
    unsigned long long total, free, used;
};
struct memory_v2 {
    unsigned int version;
    unsigned long long total, reserved, free, used;
};

EXPORT int nvmlDeviceGetMemoryInfo(device handle, struct memory *memory)
{
    REACH(handle);
    memory->total = gpu->memory_total_bytes;
    memory->used = gpu->memory_used_bytes + gpu->memory_reserved_bytes;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(device handle, struct memory_v2 *memory)
{
    REACH(handle);
    if (mig_number(handle)) {
        memory->total = gpu->memory_total_bytes / 8;
        memory->reserved = 0;
        memory->used = (uint64_t)gpu->mig_memory_used_mib_each << 20;
        memory->free = memory->total - memory->used;
        return SUCCESS;
    }
    memory->total = gpu->memory_total_bytes;
    memory->reserved = gpu->memory_reserved_bytes;
    memory->used = gpu->memory_used_bytes;
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

static uint64_t ecc_errors(volatile struct gpu *gpu, unsigned int uncorrected, unsigned int aggregate)
{
    if (aggregate)
        return uncorrected ? gpu->ecc_dbe_aggregate : gpu->ecc_sbe_aggregate;
    return uncorrected ? gpu->ecc_dbe_volatile : gpu->ecc_sbe_volatile;
}

EXPORT int nvmlDeviceGetTotalEccErrors(
    device handle, unsigned int uncorrected, unsigned int aggregate, unsigned long long *count)
{
    REACH(handle);
    ABLE(CALL_ECC);
    *count = ecc_errors(gpu, uncorrected, aggregate);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetRemappedRows(
    device handle, unsigned int *correctable, unsigned int *uncorrectable, unsigned int *pending,
    unsigned int *failure)
{
    REACH(handle);
    *correctable = gpu->remapped_rows_correctable;
    *uncorrectable = gpu->remapped_rows_uncorrectable;
    *pending = gpu->remap_pending;
    *failure = gpu->remap_failure;
    return SUCCESS;
}

struct process {
    unsigned int pid;
    unsigned long long used_bytes;
    unsigned int gpu_instance, compute_instance;
};

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(
    device handle, unsigned int *count, struct process *processes)
{
    REACH(handle);
    unsigned int found = 0, room = *count;
    volatile uint32_t *pids = &gpu->process_pid_0;
    volatile uint64_t *used_bytes = &gpu->process_bytes_0;
    ABLE(CALL_PROCESSES);
    for (unsigned int slot = 0; slot < STATE_PROCESSES; slot++) {
        if (!pids[slot])
            continue;
        if (found < room && processes)
            processes[found] = (struct process){pids[slot], used_bytes[slot], ~0u, ~0u};
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

struct process_sample {
    unsigned int pid;
    unsigned long long time_us;
    unsigned int sm_percent, memory_percent, encoder_percent, decoder_percent;
};

/* Like the driver, this lists only processes that used the SMs since `last_seen_us`. */
EXPORT int nvmlDeviceGetProcessUtilization(
    device handle, struct process_sample *samples, unsigned int *count,
    unsigned long long last_seen_us)
{
    REACH(handle);
    unsigned int found = 0, room = *count;
    struct timespec now;
    volatile uint32_t *pids = &gpu->process_pid_0, *percents = &gpu->process_percent_0;
    ABLE(CALL_PROCESS_UTILIZATION);
    clock_gettime(CLOCK_REALTIME, &now);
    unsigned long long time_us = now.tv_sec * 1000000ull + now.tv_nsec / 1000;
    for (unsigned int slot = 0; slot < STATE_PROCESSES; slot++) {
        if (!pids[slot] || !percents[slot] || time_us <= last_seen_us)
            continue;
        if (found < room && samples)
            samples[found] = (struct process_sample){pids[slot], time_us, percents[slot], 0, 0, 0};
        found++;
    }
    *count = found;
    if (!found)
        return NOT_FOUND;
    return found > room || !samples ? INSUFFICIENT_SIZE : SUCCESS;
}

/* MIG: the first mig_instances of seven slices. */

EXPORT int nvmlDeviceGetMigMode(device handle, unsigned int *current, unsigned int *pending)
{
    REACH(handle);
    ABLE(CALL_MIG);
    *current = *pending = gpu->mig_mode;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(device handle, unsigned int *count)
{
    REACH(handle);
    ABLE(CALL_MIG);
    *count = MIG_MOST;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(device handle, unsigned int index, device *mig)
{
    REACH(handle);
    ABLE(CALL_MIG);
    if (index >= MIG_MOST)
        return INVALID_ARGUMENT;
    if (!gpu->mig_mode || index >= gpu->mig_instances)
        return NOT_FOUND;
    *mig = (device)((uintptr_t)handle | (uintptr_t)(index + 1) << MIG_SHIFT);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetGpuInstanceId(device handle, unsigned int *id)
{
    REACH(handle);
    if (!mig_number(handle))
        return INVALID_ARGUMENT;
    *id = mig_number(handle) + 6; /* the ids of 1g slices start at 7 */
    return SUCCESS;
}

struct attributes {
    unsigned int multiprocessors, copy_engines, decoders, encoders, jpeg, ofa, gpu_slices,
        compute_slices;
    unsigned long long memory_mib;
};

EXPORT int nvmlDeviceGetAttributes_v2(device handle, struct attributes *attributes)
{
    REACH(handle);
    if (!mig_number(handle))
        return INVALID_ARGUMENT;
    *attributes = (struct attributes){.multiprocessors = 16, .copy_engines = 1, .gpu_slices = 1,
                                      .compute_slices = 1,
                                      .memory_mib = (gpu->memory_total_bytes >> 20) / 8};
    return SUCCESS;
}

EXPORT int nvmlDeviceGetNvLinkState(device handle, unsigned int link, unsigned int *active)
{
    REACH(handle);
    ABLE(CALL_NVLINK);
    if (link >= gpu->nvlink_links)
        return INVALID_ARGUMENT;
    *active = link < gpu->nvlink_links_active;
    return SUCCESS;
}

enum { END_GPU = 0, END_SWITCH = 2 };

/* The GPU at the other end of a link, or STATE_GPUS for a switch. */
static int end_of(volatile struct gpu *gpu, unsigned int link, unsigned int *other)
{
    ABLE(CALL_NVLINK | CALL_NVLINK_ENDS);
    if (link >= gpu->nvlink_links)
        return INVALID_ARGUMENT;
    *other = STATE_GPUS;
    if (gpu->nvlink_links_per_peer) {
        *other = link / gpu->nvlink_links_per_peer;
        *other += *other >= (unsigned int)(gpu - state->gpus);
        if (*other >= state->gpu_count)
            return NOT_SUPPORTED;
    }
    return SUCCESS;
}

EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(device handle, unsigned int link, int *type)
{
    unsigned int other;
    REACH(handle);
    int found = end_of(gpu, link, &other);
    if (found == SUCCESS)
        *type = other < STATE_GPUS ? END_GPU : END_SWITCH;
    return found;
}

EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(
    device handle, unsigned int link, struct pci_info *info)
{
    unsigned int other;
    REACH(handle);
    int found = end_of(gpu, link, &other);
    if (found != SUCCESS)
        return found;
    memset(info, 0, sizeof(*info));
    if (other < STATE_GPUS)
        copy_text(info->bus_id, sizeof(info->bus_id), state->gpus[other].pci_bus_id);
    else
        snprintf(info->bus_id, sizeof(info->bus_id), "00000000:%02X:00.0", 0xE0 + link / 5);
    return SUCCESS;
}

/* Many values at once. */

struct field_value {
    uint32_t field, scope;
    int64_t timestamp_us, latency_us;
    uint32_t type;
    int32_t result;
    uint64_t value;
};

#define ALL_LINKS 0xffffffffu

static uint64_t field_call(uint32_t field)
{
    switch (field) {
    case 1: case 2: case 3: case 4: case 5: case 6: return CALL_ECC;
    case 29: case 30: case 31: return CALL_RETIRED_PAGES;
    case 38: case 45: case 52: case 59: case 91: return CALL_NVLINK;
    case 74: case 75: case 76: case 77: case 78: case 79: case 80: case 81:
        return CALL_VIOLATIONS;
    case 82: return CALL_MEMORY_TEMPERATURE;
    case 83: return CALL_ENERGY;
    case 138: case 139: case 161: case 162: case 163: case 164:
        return CALL_NVLINK | CALL_NVLINK_COUNTERS;
    case 142: case 143: case 144: case 145: return CALL_REMAPPED_ROWS;
    case 185: case 186: return CALL_POWER;
    case 193: case 194: case 196: return CALL_MARGINS;
    case 195: return CALL_MARGINS | CALL_MEMORY_TEMPERATURE;
    case 197: case 198: return CALL_PCIE_COUNTERS;
    case 269: case 270: case 271: return CALL_THROTTLE_COUNTERS;
    default: return ALWAYS;
    }
}

/* What is counted per link: `scope` is its number. */
static int read_link(volatile struct gpu *gpu, uint32_t field, uint32_t scope, uint64_t *value)
{
    uint64_t all = 0, links = gpu->nvlink_links;
    if (scope == ALL_LINKS ? (field > 139 || gpu->unsupported & CALL_LINK_SCOPES) : scope >= links)
        return INVALID_ARGUMENT;
    switch (field) {
    case 138: all = gpu->nvlink_transmitted_kib; break;
    case 139: all = gpu->nvlink_received_kib; break;
    case 161: all = gpu->nvlink_replay_errors; break;
    case 162: all = gpu->nvlink_recovery_errors; break;
    case 163: all = gpu->nvlink_crc_flit_errors; break;
    case 164: *value = gpu->nvlink_megabytes_per_second; return SUCCESS;
    }
    if (scope == ALL_LINKS)
        *value = all;
    else if (field <= 139)
        *value = all / links;
    else
        *value = scope == gpu->nvlink_error_link ? all : 0;
    return SUCCESS;
}

static int read_field(volatile struct gpu *gpu, struct field_value *asked)
{
    uint32_t field = asked->field;
    uint64_t *value = &asked->value;
    int64_t margin;
    ABLE(field_call(field));
    asked->type = VALUE_UNSIGNED_LONG_LONG;
    switch (field) {
    case 1: *value = gpu->ecc_mode; break;
    case 2: *value = gpu->ecc_mode_pending; break;
    case 3: *value = gpu->ecc_sbe_volatile; break;
    case 4: *value = gpu->ecc_dbe_volatile; break;
    case 5: *value = gpu->ecc_sbe_aggregate; break;
    case 6: *value = gpu->ecc_dbe_aggregate; break;
    case 29: *value = gpu->retired_pages_sbe; break;
    case 30: *value = gpu->retired_pages_dbe; break;
    case 31: *value = gpu->retired_pages_pending; break;
    case 38: *value = gpu->nvlink_crc_flit_errors; break;
    case 45: *value = gpu->nvlink_crc_data_errors; break;
    case 52: *value = gpu->nvlink_replay_errors; break;
    case 59: *value = gpu->nvlink_recovery_errors; break;
    case 74: *value = gpu->power_violation_ns; break;
    case 75: *value = gpu->thermal_violation_ns; break;
    case 76: *value = gpu->sync_boost_violation_ns; break;
    case 77: *value = gpu->board_limit_violation_ns; break;
    case 78: *value = gpu->low_utilization_violation_ns; break;
    case 79: *value = gpu->reliability_violation_ns; break;
    case 80: *value = gpu->app_clocks_violation_ns; break;
    case 81: *value = gpu->base_clocks_violation_ns; break;
    case 82: *value = gpu->memory_temperature_celsius; break;
    case 83: *value = energy_millijoules(gpu); break;
    case 91: *value = gpu->nvlink_links; break;
    case 94: *value = gpu->pcie_replays; break;
    case 138: case 139: case 161: case 162: case 163: case 164:
        return read_link(gpu, field, asked->scope, value);
    case 142: *value = gpu->remapped_rows_correctable; break;
    case 143: *value = gpu->remapped_rows_uncorrectable; break;
    case 144: *value = gpu->remap_pending; break;
    case 145: *value = gpu->remap_failure; break;
    case 185: case 186: *value = gpu->power_milliwatts; break;
    case 193: case 194: case 195: case 196:
        margin = (int64_t)gpu->maximum_celsius
            - (field == 193 ? gpu->shutdown_celsius
               : field == 194 ? gpu->slowdown_celsius : gpu->maximum_celsius);
        *value = (uint32_t)(int32_t)margin;
        asked->type = VALUE_SIGNED_INT;
        break;
    case 197: *value = gpu->pcie_transmitted_bytes; break;
    case 198: *value = gpu->pcie_received_bytes; break;
    case 269: *value = gpu->software_thermal_ns; break;
    case 270: *value = gpu->hardware_thermal_ns; break;
    case 271: *value = gpu->power_brake_ns; break;
    default: return NOT_SUPPORTED;
    }
    return SUCCESS;
}

EXPORT int nvmlDeviceGetFieldValues(device handle, int count, struct field_value *values)
{
    REACH(handle);
    for (int i = 0; i < count; i++) {
        values[i].value = 0;
        values[i].timestamp_us = (int64_t)milliseconds() * 1000;
        values[i].result = read_field(gpu, &values[i]);
        if (values[i].field == gpu->strange_field)
            values[i].type = 99;
    }
    return SUCCESS;
}

/* How busy its units were between two samples. */

struct activity_sample {
    unsigned int gpu;
    uint64_t milliseconds;
};

struct activity_metric {
    unsigned int metric;
    int result;
    double value;
    char *names[3];
};

struct activity_question {
    unsigned int version, count;
    struct activity_sample *first, *second;
    struct activity_metric metrics[];
};

struct activity_support {
    unsigned int version, supported;
};

EXPORT int nvmlGpmQueryDeviceSupport(device handle, struct activity_support *support)
{
    REACH(handle);
    support->supported = !(gpu->unsupported & CALL_ACTIVITY);
    return SUCCESS;
}

EXPORT int nvmlGpmSampleAlloc(struct activity_sample **sample)
{
    *sample = calloc(1, sizeof(**sample));
    return *sample ? SUCCESS : UNKNOWN;
}

EXPORT int nvmlGpmSampleFree(struct activity_sample *sample)
{
    free(sample);
    return SUCCESS;
}

EXPORT int nvmlGpmSampleGet(device handle, struct activity_sample *sample)
{
    REACH(handle);
    if (gpu->mig_mode)
        return NOT_SUPPORTED;
    ABLE(CALL_ACTIVITY);
    *sample = (struct activity_sample){(unsigned int)(gpu - state->gpus), milliseconds()};
    return SUCCESS;
}

static double activity(volatile struct gpu *gpu, unsigned int metric)
{
    switch (metric) {
    case 1: return gpu->utilization_percent;
    case 2: return gpu->sm_active_percent;
    case 3: return gpu->sm_occupancy_percent;
    case 5: return gpu->tensor_active_percent;
    case 10: return gpu->memory_utilization_percent;
    case 11: return gpu->fp64_active_percent;
    case 12: return gpu->fp32_active_percent;
    case 13: return gpu->fp16_active_percent;
    case 20: return gpu->pcie_transmitted_kb_per_second / 1024.0;
    case 21: return gpu->pcie_received_kb_per_second / 1024.0;
    default: return -1;
    }
}

EXPORT int nvmlGpmMetricsGet(struct activity_question *question)
{
    if (!state)
        return UNINITIALIZED;
    if (question->version != 1 || question->first->gpu != question->second->gpu
        || question->first->milliseconds > question->second->milliseconds)
        return INVALID_ARGUMENT;
    for (unsigned int i = 0; i < question->count; i++) {
        struct activity_metric *asked = &question->metrics[i];
        asked->value = activity(&state->gpus[question->second->gpu], asked->metric);
        asked->result = asked->value < 0 ? NOT_SUPPORTED : SUCCESS;
    }
    return SUCCESS;
}

/* XID events: a set counts how many of each GPU it has reported. */

struct event_set {
    uint64_t told[STATE_GPUS];
    uint32_t registered;
};
struct event_data {
    device handle;
    unsigned long long type, data;
    unsigned int gpu_instance, compute_instance;
};
#define EVENT_XID 8ULL

EXPORT int nvmlEventSetCreate(struct event_set **set)
{
    *set = calloc(1, sizeof(**set));
    return *set ? SUCCESS : INVALID_ARGUMENT;
}

EXPORT int nvmlEventSetFree(struct event_set *set)
{
    free(set);
    return SUCCESS;
}

EXPORT int nvmlDeviceRegisterEvents(device handle, unsigned long long types, struct event_set *set)
{
    REACH(handle);
    uintptr_t index = (uintptr_t)handle - 1;
    ABLE(CALL_EVENTS);
    if (types & EVENT_XID) {
        set->registered |= 1u << index;
        set->told[index] = gpu->xid_count;
    }
    return SUCCESS;
}

EXPORT int nvmlEventSetWait_v2(
    struct event_set *set, struct event_data *event, unsigned int timeout_milliseconds)
{
    uint64_t started = milliseconds();
    do {
        if (!state)
            return UNINITIALIZED;
        if (state->driver_unloaded)
            return UNKNOWN;
        for (uint32_t i = 0; i < state->gpu_count; i++) {
            volatile struct gpu *gpu = &state->gpus[i];
            if (!(set->registered >> i & 1) || set->told[i] >= gpu->xid_count)
                continue;
            set->told[i]++;
            memset(event, 0, sizeof(*event));
            event->handle = (device)(uintptr_t)(i + 1);
            event->type = EVENT_XID;
            event->data = gpu->xid;
            return SUCCESS;
        }
        if (timeout_milliseconds)
            usleep(1000);
    } while (milliseconds() - started < timeout_milliseconds);
    return TIMEOUT;
}
