/* A libcuda whose checkpoint functions print their arguments. Process 13 cannot be locked. */
#include <stdio.h>
#include <string.h>

static int initialized;

int cuInit(unsigned int flags)
{
	initialized = flags == 0;
	return 0;
}

int cuGetErrorString(int code, const char **text)
{
	*text = "operation not permitted";
	return code == 800 ? 0 : 1;
}

static int step(const char *name, int pid, const void *args)
{
	static const char zeros[60];
	unsigned int timeout = 0;

	if (!initialized)
		return 3;
	if (args) {
		memcpy(&timeout, args, sizeof(timeout));
		if (memcmp((const char *)args + 4, zeros, sizeof(zeros)))
			return 1;
	}
	if (pid == 13)
		return 800;
	printf("%s %d %u\n", name, pid, timeout);
	fflush(stdout);
	return 0;
}

int cuCheckpointProcessLock(int pid, const void *args) { return step("lock", pid, args); }
int cuCheckpointProcessCheckpoint(int pid, const void *args) { return step("checkpoint", pid, args); }
int cuCheckpointProcessRestore(int pid, const void *args) { return step("restore", pid, args); }
#ifndef OLD
int cuCheckpointProcessUnlock(int pid, const void *args) { return step("unlock", pid, args); }
#endif
