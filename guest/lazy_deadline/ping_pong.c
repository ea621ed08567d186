// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * TCP request/response over loopback between two CPUs that go idle in between,
 * as netperf's TCP_RR: one byte there, one byte back.
 *
 * usage: ping_pong [TRANSACTIONS [CLIENT_CPU [SERVER_CPU [TIMEOUT_US]]]]
 *
 * With TIMEOUT_US each side waits as servers do, with a timeout that nearly never
 * comes: each wait moves the CPU's timer. Without, or 0, reads just block, and
 * only the kernel's own idle policy moves it.
 *
 * Prints one line of JSON. Exits with 1 and says why if something is missing.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static void pin(int cpu)
{
	cpu_set_t cpus;

	CPU_ZERO(&cpus);
	CPU_SET(cpu, &cpus);
	if (sched_setaffinity(0, sizeof(cpus), &cpus))
		fail("ping_pong: pin to a CPU");
}

static void no_delay(int fd)
{
	int on = 1;

	if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)))
		fail("ping_pong: TCP_NODELAY");
}

static long timeout_us;
static long timeouts;

static int wait_and_read(int fd, char *byte)
{
	struct pollfd wanted = { .fd = fd, .events = POLLIN };
	struct timespec limit = {
		.tv_sec = timeout_us / 1000000,
		.tv_nsec = timeout_us % 1000000 * 1000,
	};

	while (timeout_us && !ppoll(&wanted, 1, &limit, NULL))
		timeouts++;
	return read(fd, byte, 1) == 1;
}

static void serve(int listener, int cpu)
{
	int fd;
	char byte;

	pin(cpu);
	fd = accept(listener, NULL, NULL);
	if (fd < 0)
		fail("ping_pong: accept");
	no_delay(fd);
	while (wait_and_read(fd, &byte))
		if (write(fd, &byte, 1) != 1)
			fail("ping_pong: respond");
	exit(0);
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
	long transactions = argc > 1 ? atol(argv[1]) : 10000, i;
	int client = argc > 2 ? atoi(argv[2]) : 0;
	int server = argc > 3 ? atoi(argv[3]) : 1;
	struct sockaddr_in address = {
		.sin_family = AF_INET,
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};
	socklen_t length = sizeof(address);
	int listener, fd, status;
	double begin, seconds;
	char byte = 'x';
	pid_t child;

	timeout_us = argc > 4 ? atol(argv[4]) : 0;
	listener = socket(AF_INET, SOCK_STREAM, 0);
	if (listener < 0 || bind(listener, (void *)&address, length) ||
	    listen(listener, 1) ||
	    getsockname(listener, (void *)&address, &length))
		fail("ping_pong: listen on the loopback interface");
	child = fork();
	if (child < 0)
		fail("ping_pong: fork");
	if (!child)
		serve(listener, server);
	pin(client);
	fd = socket(AF_INET, SOCK_STREAM, 0);
	if (fd < 0 || connect(fd, (void *)&address, length))
		fail("ping_pong: connect over loopback (is lo up?)");
	no_delay(fd);

	begin = now();
	for (i = 0; i < transactions; i++)
		if (write(fd, &byte, 1) != 1 || !wait_and_read(fd, &byte))
			fail("ping_pong: request");
	seconds = now() - begin;

	close(fd);
	if (waitpid(child, &status, 0) != child || status) {
		fprintf(stderr, "ping_pong: the server failed\n");
		return 1;
	}
	printf("{\"transactions\":%ld,\"seconds\":%.6f,\"transactions_per_s\":%.1f,\"timeout_us\":%ld,\"timeouts\":%ld}\n",
	       transactions, seconds, transactions / seconds, timeout_us,
	       timeouts);
	return 0;
}
