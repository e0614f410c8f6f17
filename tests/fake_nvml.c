/* A driver library with two GPUs, whose limits and locked clocks are lines of the file that FAKE_NVML names.
   FAKE_NVML_ROOT=0: every setting is refused, as for a user who is not root. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static unsigned values[4]; /* limit of GPU 0, of GPU 1 in mW; clock of GPU 0, of GPU 1 in MHz, 0: not locked */

static void load(void) {
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    if (file == NULL || fscanf(file, "%u %u %u %u", values, values + 1, values + 2, values + 3) != 4) exit(9);
    fclose(file);
}

static int store(int place, unsigned value) {
    const char *root = getenv("FAKE_NVML_ROOT");
    if (root != NULL && strcmp(root, "0") == 0) return 4;
    load();
    values[place] = value;
    FILE *file = fopen(getenv("FAKE_NVML"), "w");
    fprintf(file, "%u %u %u %u\n", values[0], values[1], values[2], values[3]);
    fclose(file);
    return 0;
}

static int number(void *handle) { return (int)((char *)handle - (char *)16); }

int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (char *)16 + index; return 0; }
int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size) { snprintf(uuid, size, "GPU-%d", number(handle)); return 0; }
int nvmlDeviceGetPowerManagementLimit(void *handle, unsigned *limit) { load(); *limit = values[number(handle)]; return 0; }
int nvmlDeviceGetPowerManagementLimitConstraints(void *handle, unsigned *least, unsigned *most) {
    *least = 200000;
    *most = 700000;
    return 0;
}
int nvmlDeviceSetPowerManagementLimit(void *handle, unsigned limit) { return store(number(handle), limit); }
int nvmlDeviceSetGpuLockedClocks(void *handle, unsigned least, unsigned most) {
    return least == most ? store(2 + number(handle), most) : 2;
}
int nvmlDeviceResetGpuLockedClocks(void *handle) { return store(2 + number(handle), 0); }
