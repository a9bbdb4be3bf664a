/* A stand-in for libnvidia-ml.so.1: what NVML answers stands in a file that is read again at each call.
 *
 * GPULEDGER_TEST_NVML_STATE names the file. One fact a line, blank-separated; text runs to the end of its line:
 *
 *     init CODE          what every call answers, nvmlInit first (9: the driver is not loaded); 0 when left out
 *     build NUMBER       the library that fits the loaded driver; one compiled with another SHIM_BUILD answers 18
 *     load NUMBER        counts the driver's loads; a session begun under another one answers 999
 *     driver VERSION
 *     card UUID          the lines up to the next card are about this one
 *       name TEXT, total N, used N, free N
 *       restless 0|1                                          whether total and free are more by one at each look
 *       error CODE, memory_error CODE, process_error CODE     what all its calls, or those, answer
 *       persistence 0|1                                       not supported when left out
 *       mig 0|1, ecc COUNT, lifetime COUNT,                   not supported when left out, as on a desktop's card;
 *       remap PENDING FAILED ROWS                             mig beyond 1 is what is answered instead
 *       process LIST PID BYTES                                compute, graphics or mps; - for bytes that are withheld
 *       events CODE, wait CODE                                what registering for events, or waiting for them, answers
 *       xid CODE GI                                           one that happened, the oldest first; - for no instance.
 *                                                             A set delivers what came after it was registered
 *     instance SLOT GI CI UUID   a MIG instance of the card before it; the lines up to the next are about it, as for a card
 *
 * A handle of an instance that is no more answers "invalid argument". An event set that answered an error once stays so.
 * There are few of them, and those that are not freed before the end of the session leave a line in the file STATE.leaks.
 *
 * The calls and structures are those of driver 510 and later, as nvml.h documents them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef SHIM_BUILD
#define SHIM_BUILD 1
#endif

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NOT_LOADED = 9, TIMEOUT = 10, LOST = 15, MISMATCH = 18, NO_RESOURCES = 23, UNKNOWN = 999 };
enum { MAX_CARDS = 64, MAX_PROCESSES = 64, MAX_XIDS = 256, MAX_SETS = 8, MIG_SLOTS = 7 };
enum list { COMPUTE, GRAPHICS, MPS };

typedef unsigned long long u64;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } process_info;
typedef struct { u64 total, free, used; } memory_v1;
typedef struct { unsigned version; u64 total, reserved, free, used; } memory_v2;
typedef struct { char legacy[16]; unsigned domain, bus, device, pci_device, pci_subsystem; char id[32]; } pci_info;

typedef struct { void *device; u64 type, data; unsigned gpu_instance, compute_instance; } event_data;

typedef struct {
    char uuid[96], name[96];
    int parent, slot; /* of an instance: its card, and where on it; -1 */
    unsigned gpu_instance, compute_instance;
    int error, memory_error, process_error, mig, pending, failed, rows, persistence, events, wait, restless;
    long long ecc, lifetime;
    u64 total, used, free;
    int process_count, xid_count;
    u64 xids[MAX_XIDS];
    unsigned hit[MAX_XIDS];
    enum list lists[MAX_PROCESSES];
    process_info processes[MAX_PROCESSES];
} card;

typedef struct {
    int init, build, load, card_count;
    char driver[80];
    card cards[MAX_CARDS];
} state;

static int session = -1; /* the driver's load that this session is with; -1 before nvmlInit */

static void read_line(state *all, const char *key, const char *value) {
    card *one = all->card_count ? &all->cards[all->card_count - 1] : NULL;
    if (!strcmp(key, "init")) all->init = atoi(value);
    else if (!strcmp(key, "build")) all->build = atoi(value);
    else if (!strcmp(key, "load")) all->load = atoi(value);
    else if (!strcmp(key, "driver")) snprintf(all->driver, sizeof all->driver, "%s", value);
    else if (!strcmp(key, "card") && all->card_count < MAX_CARDS) {
        one = &all->cards[all->card_count++];
        memset(one, 0, sizeof *one);
        one->mig = one->pending = one->persistence = one->ecc = one->lifetime = -1; /* not offered, as on a desktop card */
        one->parent = one->slot = -1;
        one->gpu_instance = one->compute_instance = ~0U;
        snprintf(one->uuid, sizeof one->uuid, "%s", value);
    }
    else if (!strcmp(key, "instance") && one && all->card_count < MAX_CARDS) {
        int parent = one->parent < 0 ? all->card_count - 1 : one->parent;
        one = &all->cards[all->card_count++];
        memset(one, 0, sizeof *one);
        one->parent = parent;
        one->mig = one->pending = one->persistence = one->ecc = one->lifetime = -1;
        sscanf(value, "%d %u %u %95s", &one->slot, &one->gpu_instance, &one->compute_instance, one->uuid);
    }
    else if (!one) return;
    else if (!strcmp(key, "name")) snprintf(one->name, sizeof one->name, "%s", value);
    else if (!strcmp(key, "error")) one->error = atoi(value);
    else if (!strcmp(key, "memory_error")) one->memory_error = atoi(value);
    else if (!strcmp(key, "process_error")) one->process_error = atoi(value);
    else if (!strcmp(key, "mig")) one->mig = atoi(value);
    else if (!strcmp(key, "persistence")) one->persistence = atoi(value);
    else if (!strcmp(key, "ecc")) one->ecc = atoll(value);
    else if (!strcmp(key, "lifetime")) one->lifetime = atoll(value);
    else if (!strcmp(key, "remap")) sscanf(value, "%d %d %d", &one->pending, &one->failed, &one->rows);
    else if (!strcmp(key, "events")) one->events = atoi(value);
    else if (!strcmp(key, "wait")) one->wait = atoi(value);
    else if (!strcmp(key, "xid") && one->xid_count < MAX_XIDS) {
        char instance[16];
        sscanf(value, "%llu %15s", &one->xids[one->xid_count], instance);
        one->hit[one->xid_count++] = strcmp(instance, "-") ? (unsigned)atoi(instance) : ~0U;
    }
    else if (!strcmp(key, "restless")) one->restless = atoi(value);
    else if (!strcmp(key, "total")) one->total = strtoull(value, NULL, 10);
    else if (!strcmp(key, "used")) one->used = strtoull(value, NULL, 10);
    else if (!strcmp(key, "free")) one->free = strtoull(value, NULL, 10);
    else if (!strcmp(key, "process") && one->process_count < MAX_PROCESSES) {
        char list[16], bytes[32];
        process_info *process = &one->processes[one->process_count];
        sscanf(value, "%15s %u %31s", list, &process->pid, bytes);
        process->used = strcmp(bytes, "-") ? strtoull(bytes, NULL, 10) : ~0ULL; /* NVML_VALUE_NOT_AVAILABLE */
        process->gpu_instance = one->gpu_instance;
        process->compute_instance = one->compute_instance;
        one->lists[one->process_count++] = !strcmp(list, "graphics") ? GRAPHICS : !strcmp(list, "mps") ? MPS : COMPUTE;
    }
}

static state *now(void) {
    static state all;
    char line[256];
    const char *path = getenv("GPULEDGER_TEST_NVML_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    memset(&all, 0, sizeof all);
    if (!file) { all.init = NOT_LOADED; return &all; }
    while (fgets(line, sizeof line, file)) {
        char *key = strtok(line, " \n"), *value = strtok(NULL, "\n");
        if (key) read_line(&all, key, value ? value : "");
    }
    fclose(file);
    return &all;
}

static int check(const state *all) {
    if (session < 0) return UNINITIALIZED;
    if (all->init) return all->init;
    return all->load == session ? OK : UNKNOWN;
}

/* A handle is the address of a slot that remembers a UUID: it stays with its card when indices move. */
static char handles[MAX_CARDS][96];

static char *handle_of(const char *uuid) {
    int slot = 0;
    while (slot < MAX_CARDS - 1 && handles[slot][0] && strcmp(handles[slot], uuid)) slot++;
    snprintf(handles[slot], sizeof handles[slot], "%s", uuid);
    return handles[slot];
}

static int find(const char *handle, card **found) {
    state *all = now();
    int code = check(all);
    if (code) return code;
    for (int i = 0; i < all->card_count; i++)
        if (!strcmp(all->cards[i].uuid, handle)) { *found = &all->cards[i]; return all->cards[i].error; }
    return strncmp(handle, "MIG-", 4) ? LOST : INVALID; /* the card, or the instance, of this handle is gone */
}

int nvmlInitWithFlags(unsigned flags) {
    state *all = now();
    (void)flags;
    if (all->init) return all->init;
    if (all->build && all->build != SHIM_BUILD) return MISMATCH;
    session = all->load;
    memset(handles, 0, sizeof handles);
    return OK;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
/* Shutting down does not free them, as no document says that it does. */
static struct { int taken, delivered, broken; char *device; } sets[MAX_SETS];

int nvmlShutdown(void) {
    int open = session >= 0;
    char path[4096];
    session = -1;
    for (int i = 0; i < MAX_SETS; i++) {
        if (!sets[i].taken) continue;
        snprintf(path, sizeof path, "%s.leaks", getenv("GPULEDGER_TEST_NVML_STATE"));
        FILE *file = fopen(path, "a");
        if (file) { fprintf(file, "an event set\n"); fclose(file); }
    }
    return open ? OK : UNINITIALIZED;
}
const char *nvmlErrorString(int code) { (void)code; return "an error of the shim"; }

static int text(const char *from, char *to, unsigned size) {
    return (unsigned)snprintf(to, size, "%s", from) < size ? OK : TOO_SMALL;
}
int nvmlSystemGetDriverVersion(char *to, unsigned size) { state *all = now(); int code = check(all); return code ? code : text(all->driver, to, size); }
int nvmlDeviceGetCount_v2(unsigned *count) {
    state *all = now();
    *count = 0;
    for (int i = 0; i < all->card_count; i++) *count += all->cards[i].parent < 0;
    return check(all);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, char **handle) {
    state *all = now();
    int code = check(all);
    if (code) return code;
    for (int i = 0; i < all->card_count; i++)
        if (all->cards[i].parent < 0 && !index--) { *handle = handle_of(all->cards[i].uuid); return all->cards[i].error; }
    return INVALID;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, char **handle) {
    card *one;
    int code = find(uuid, &one);
    if (code == LOST) return NOT_FOUND;
    *handle = handle_of(uuid);
    return code;
}
int nvmlDeviceGetName(char *handle, char *to, unsigned size) { card *one; int code = find(handle, &one); return code ? code : text(one->name, to, size); }
int nvmlDeviceGetUUID(char *handle, char *to, unsigned size) { card *one; int code = find(handle, &one); return code ? code : text(one->uuid, to, size); }
int nvmlDeviceGetPciInfo_v3(char *handle, pci_info *info) {
    card *one;
    int code = find(handle, &one);
    memset(info, 0, sizeof *info);
    if (!code) snprintf(info->id, sizeof info->id, "00000000:%02X:00.0", (unsigned)(handle - handles[0]) / 96 + 1);
    return code;
}

static u64 more(card *one) { static u64 looks; return one->restless ? ++looks : 0; }
int nvmlDeviceGetMemoryInfo(char *handle, memory_v1 *info) {
    card *one;
    int code = find(handle, &one);
    if (code || (code = one->memory_error)) return code;
    u64 n = more(one);
    *info = (memory_v1){one->total + n, one->free + n, one->used};
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(char *handle, memory_v2 *info) {
    card *one;
    int code = find(handle, &one);
    if (code || (code = one->memory_error)) return code;
    u64 n = more(one);
    *info = (memory_v2){info->version, one->total + n, 0, one->free + n, one->used};
    return OK;
}

static int processes(char *handle, enum list list, unsigned *count, process_info *to) {
    card *one;
    int code = find(handle, &one);
    unsigned room = *count;
    if (code || (code = one->process_error)) return code;
    *count = 0;
    for (int i = 0; i < one->process_count; i++)
        if (one->lists[i] == list && ++*count <= room && to) to[*count - 1] = one->processes[i];
    return *count > room || (*count && !to) ? TOO_SMALL : OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(char *h, unsigned *n, process_info *to) { return processes(h, COMPUTE, n, to); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(char *h, unsigned *n, process_info *to) { return processes(h, GRAPHICS, n, to); }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(char *h, unsigned *n, process_info *to) { return processes(h, MPS, n, to); }

int nvmlDeviceGetMigMode(char *handle, unsigned *current, unsigned *pending) {
    card *one;
    int code = find(handle, &one);
    if (code || one->mig < 0) return code ? code : UNSUPPORTED;
    if (one->mig > 1) return one->mig;
    *current = *pending = one->mig;
    return OK;
}
int nvmlDeviceGetPersistenceMode(char *handle, unsigned *mode) {
    card *one;
    int code = find(handle, &one);
    if (code || one->persistence < 0) return code ? code : UNSUPPORTED;
    *mode = one->persistence;
    return OK;
}
int nvmlDeviceGetEccMode(char *handle, unsigned *current, unsigned *pending) {
    card *one;
    int code = find(handle, &one);
    if (code || one->ecc < 0) return code ? code : UNSUPPORTED;
    *current = *pending = 1;
    return OK;
}
int nvmlDeviceGetTotalEccErrors(char *handle, int type, int counter, u64 *count) {
    card *one;
    int code = find(handle, &one);
    if (code || (counter ? one->lifetime : one->ecc) < 0) return code ? code : UNSUPPORTED;
    *count = type == 1 ? (u64)(counter ? one->lifetime : one->ecc) : 0;
    return OK;
}
int nvmlDeviceGetRemappedRows(char *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    card *one;
    int code = find(handle, &one);
    if (code || one->pending < 0) return code ? code : UNSUPPORTED;
    *corrected = 0;
    *uncorrected = one->rows;
    *pending = one->pending;
    *failed = one->failed;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(char *handle, unsigned *count) {
    card *one;
    int code = find(handle, &one);
    *count = !code && one->mig > 0 ? MIG_SLOTS : 0;
    return code;
}
int nvmlDeviceGetMigDeviceHandleByIndex(char *handle, unsigned slot, char **instance) {
    card *one;
    int code = find(handle, &one);
    if (code) return code;
    state *all = now();
    for (int i = 0; i < all->card_count; i++) {
        card *other = &all->cards[i];
        if (other->parent < 0 || other->slot != (int)slot || strcmp(all->cards[other->parent].uuid, handle)) continue;
        *instance = handle_of(other->uuid);
        return other->error;
    }
    return NOT_FOUND;
}
int nvmlDeviceGetGpuInstanceId(char *handle, unsigned *id) {
    card *one;
    int code = find(handle, &one);
    if (code || one->parent < 0) return code ? code : INVALID;
    *id = one->gpu_instance;
    return OK;
}
int nvmlDeviceGetComputeInstanceId(char *handle, unsigned *id) {
    card *one;
    int code = find(handle, &one);
    if (code || one->parent < 0) return code ? code : INVALID;
    *id = one->compute_instance;
    return OK;
}

int nvmlEventSetCreate(void **set) {
    int code = check(now());
    if (code) return code;
    for (int i = 0; i < MAX_SETS; i++)
        if (!sets[i].taken) { memset(&sets[i], 0, sizeof sets[i]); sets[i].taken = 1; *set = &sets[i]; return OK; }
    return NO_RESOURCES;
}
int nvmlDeviceRegisterEvents(char *handle, u64 types, void *set) {
    card *one;
    int code = find(handle, &one), i = (int)((char *)set - (char *)sets) / (int)sizeof sets[0];
    if (code || (code = one->events)) return code;
    if (types != 8 || one->parent >= 0) return INVALID; /* XidCriticalError alone, of a card */
    sets[i].device = handle;
    sets[i].delivered = one->xid_count;
    return OK;
}
int nvmlEventSetWait_v2(void *set, event_data *event, unsigned timeout_ms) {
    int i = (int)((char *)set - (char *)sets) / (int)sizeof sets[0];
    card *one;
    int code = sets[i].broken ? sets[i].broken : find(sets[i].device, &one);
    (void)timeout_ms;
    if (code || (code = one->wait)) return sets[i].broken = code;
    if (sets[i].delivered >= one->xid_count) return TIMEOUT;
    int next = sets[i].delivered++;
    *event = (event_data){sets[i].device, 8, one->xids[next], one->hit[next], ~0U};
    return OK;
}
int nvmlEventSetFree(void *set) {
    int code = check(now()), i = (int)((char *)set - (char *)sets) / (int)sizeof sets[0];
    sets[i].taken = 0;
    return code;
}
