// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * A process on each CPU, or on one, that sleeps again and again: every deadline
 * comes due, and none is moved. For the latency of timers.
 *
 * usage: sleepers [TIMES [US [CPU]]]
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static void doze(int cpu, long times, long us)
{
	struct timespec time = {
		.tv_sec = us / 1000000,
		.tv_nsec = us % 1000000 * 1000,
	};
	cpu_set_t cpus;

	CPU_ZERO(&cpus);
	CPU_SET(cpu, &cpus);
	if (sched_setaffinity(0, sizeof(cpus), &cpus))
		fail("sleepers: pin to a CPU");
	while (times--)
		nanosleep(&time, NULL);
	exit(0);
}

int main(int argc, char **argv)
{
	long times = argc > 1 ? atol(argv[1]) : 1000;
	long us = argc > 2 ? atol(argv[2]) : 1000;
	long first = argc > 3 ? atol(argv[3]) : 0;
	long last = argc > 3 ? first : sysconf(_SC_NPROCESSORS_ONLN) - 1, cpu;
	int status, failed = 0;

	for (cpu = first; cpu <= last; cpu++) {
		pid_t child = fork();

		if (child < 0)
			fail("sleepers: fork");
		if (!child)
			doze(cpu, times, us);
	}
	while (wait(&status) > 0)
		failed |= status;
	return !!failed;
}
