/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Brings the call frame information (CFI) of processes into their memory, so that a hypervisor that reads a guest's stacks finds it
 * (docs/how/lbr.md, "Call stacks").
 *
 * A program's CFI is mapped and seldom touched, so that its pages are absent. This program reads one byte of each by
 * process_vm_readv: the kernel brings the page in, as for any read, and nothing in the process changes.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <elf.h>
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096ul
#define MOST 4096
/* Pages of one call: IOV_MAX is 1024. */
#define BATCH 512
/* The most CFI of one object, 256 MiB: what a header says need not be true. */
#define LONGEST (1ul << 28)

/* A process that was looked at, and what it had mapped then. */
struct seen {
    pid_t pid;
    uint64_t maps;
    /* The last look at all that found it. */
    unsigned look;
};

static struct seen seen[MOST];
static unsigned count, looks;
static unsigned long pages, objects;

static int read_at(pid_t pid, uint64_t address, void *to, size_t length)
{
    struct iovec here = { to, length };
    struct iovec there = { (void *)(uintptr_t)address, length };

    return process_vm_readv(pid, &here, 1, &there, 1, 0) == (ssize_t)length;
}

static void touch(pid_t pid, uint64_t from, uint64_t to)
{
    static char bytes[BATCH];
    struct iovec here = { bytes, 0 }, there[BATCH];

    from &= ~(PAGE - 1);
    while (from < to) {
        unsigned n = 0;

        for (; n < BATCH && from < to; from += PAGE)
            there[n++] = (struct iovec){ (void *)(uintptr_t)from, 1 };
        here.iov_len = n;
        ssize_t done = process_vm_readv(pid, &here, 1, there, n, 0);

        if (done <= 0)
            return;
        pages += done;
    }
}

/* Touches the CFI of the object whose header is at `base`. */
static void object(pid_t pid, uint64_t base)
{
    Elf64_Ehdr head;
    Elf64_Phdr segments[64];
    uint64_t bias = 0, header = 0, length = 0, cfi;
    int has_bias = 0, offset;
    unsigned char first[4];

    if (!read_at(pid, base, &head, sizeof head) || memcmp(head.e_ident, ELFMAG, SELFMAG) ||
        head.e_ident[EI_CLASS] != ELFCLASS64 || head.e_phentsize != sizeof *segments ||
        head.e_phnum > 64 ||
        !read_at(pid, base + head.e_phoff, segments, head.e_phnum * sizeof *segments))
        return;
    for (unsigned n = 0; n < head.e_phnum; n++) {
        if (segments[n].p_type == PT_LOAD && !has_bias) {
            bias = base - (segments[n].p_vaddr & ~(PAGE - 1));
            has_bias = 1;
        }
        if (segments[n].p_type == PT_GNU_EH_FRAME) {
            header = segments[n].p_vaddr;
            length = segments[n].p_memsz;
        }
    }
    /* .eh_frame_hdr begins with the distance to .eh_frame, as all linkers write it. */
    if (!has_bias || !header || length > LONGEST || !read_at(pid, header + bias, first, 4) ||
        first[0] != 1 || first[1] != 0x1b || !read_at(pid, header + bias + 4, &offset, 4))
        return;
    objects++;
    touch(pid, header + bias, header + bias + length);
    /* Its end is not said: it goes up to the end of the segment that has it, at most. */
    cfi = header + 4 + offset;
    for (unsigned n = 0; n < head.e_phnum; n++) {
        const Elf64_Phdr *segment = &segments[n];
        uint64_t end = segment->p_vaddr + segment->p_filesz;

        if (segment->p_type == PT_LOAD && segment->p_vaddr <= cfi && cfi < end &&
            end - cfi <= LONGEST)
            touch(pid, cfi + bias, end + bias);
    }
}

/* Touches the CFI of what a process has mapped. Returns 0 if that is what it had mapped before. */
static int process(pid_t pid)
{
    char path[64], *line = NULL;
    size_t room = 0;
    uint64_t hash = 0xcbf29ce484222325, bases[1024];
    unsigned n = 0, known;
    FILE *maps;

    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    maps = fopen(path, "re");
    if (!maps)
        return 0;
    while (getline(&line, &room, maps) > 0) {
        unsigned long from, offset, inode;
        char rights[8];

        if (sscanf(line, "%lx-%*x %7s %lx %*s %lu", &from, rights, &offset, &inode) != 4)
            continue;
        if (offset != 0 || rights[0] != 'r' || (inode == 0 && !strstr(line, "[vdso]")))
            continue;
        hash = (hash ^ from ^ inode << 1) * 0x100000001b3;
        if (n < 1024)
            bases[n++] = from;
    }
    free(line);
    fclose(maps);
    for (known = 0; known < count && seen[known].pid != pid; known++)
        ;
    if (known < count && seen[known].maps == hash) {
        seen[known].look = looks;
        return 0;
    }
    for (unsigned i = 0; i < n; i++)
        object(pid, bases[i]);
    /* With more processes than this the last ones are touched at each look, and hasten none. */
    if (known == MOST)
        return 0;
    if (known == count)
        count++;
    seen[known] = (struct seen){ pid, hash, looks };
    return 1;
}

static pid_t parent(pid_t pid)
{
    char path[64], line[512], *end;
    FILE *stat;
    int of = 0;

    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    stat = fopen(path, "re");
    if (!stat)
        return 0;
    /* The name in parentheses may have any character. */
    if (fgets(line, sizeof line, stat) && (end = strrchr(line, ')')))
        sscanf(end + 1, " %*c %d", &of);
    fclose(stat);
    return of;
}

/* Looks at all processes that `root` has started; with 0, at all that there are. Returns whether any has mapped something. */
static int descendants(pid_t root)
{
    DIR *proc = opendir("/proc");
    struct dirent *entry;
    int is_new = 0;

    if (!proc)
        return 0;
    looks++;
    while ((entry = readdir(proc))) {
        pid_t pid = isdigit(entry->d_name[0]) ? atoi(entry->d_name) : 0, up = pid;

        if (pid == 0 || pid == getpid())
            continue;
        for (int depth = 0; root && up > 1 && up != root && depth < 16; depth++)
            up = parent(up);
        if (!root || up == root)
            is_new |= process(pid);
    }
    closedir(proc);
    /* Processes that have gone leave their room to others. */
    for (unsigned n = count; n-- > 0;)
        if (seen[n].look != looks)
            seen[n] = seen[--count];
    return is_new;
}

/* Says why perf will refuse, where the processor records no calls. */
static void check_processor(void)
{
    FILE *cpus = fopen("/proc/cpuinfo", "re");
    char line[256];

    while (cpus && fgets(line, sizeof line, cpus))
        if (!strncmp(line, "vendor_id", 9)) {
            if (strstr(line, "AuthenticAMD"))
                fputs("vpmu-callstacks: AMD's processors have no call stacks, and perf refuses --call-graph lbr: "
                      "the host has to start this guest with --model intel --lbr on\n", stderr);
            break;
        }
    if (cpus)
        fclose(cpus);
}

static int is_gone(pid_t pid)
{
    return kill(pid, 0) && errno == ESRCH;
}

static int usage(int status)
{
    fputs("usage: vpmu-callstacks [-i MS] [-v] (-a | -p PID | [--] COMMAND...)\n"
          "Brings the call frame information of processes into their memory, for\n"
          "`perf record --call-graph lbr` in a guest of vpmu.\n\n"
          "  COMMAND   run it, as `perf record --call-graph lbr ./program`: what it starts\n"
          "  -p PID    a process that runs, until it ends\n"
          "  -a        all processes, until this is interrupted (needs root)\n"
          "  -i MS     look for new programs and libraries at least so often (default: 20)\n"
          "  -v        say at the end how much there was\n"
          "  -h        show this\n",
          status ? stderr : stdout);
    return status;
}

int main(int count_of, char **arguments)
{
    long interval = 20;
    int option, all = 0, verbose = 0, status = 0;
    pid_t root = 0, child = 0;

    if (count_of == 2 && !strcmp(arguments[1], "--help"))
        return usage(0);
    while ((option = getopt(count_of, arguments, "+ai:p:vh")) != -1) {
        switch (option) {
        case 'a': all = 1; break;
        case 'i': interval = atol(optarg); break;
        case 'p': root = atoi(optarg); break;
        case 'v': verbose = 1; break;
        case 'h': return usage(0);
        default: return usage(2);
        }
    }
    if (interval < 1 || interval > 60000 || root < 0 || !!root + all + (optind < count_of) != 1)
        return usage(2);
    if (root && is_gone(root)) {
        fprintf(stderr, "vpmu-callstacks: no process %d\n", root);
        return 1;
    }
    check_processor();
    if (optind < count_of) {
        child = fork();
        if (child < 0) {
            perror("vpmu-callstacks: fork");
            return 1;
        }
        if (child == 0) {
            execvp(arguments[optind], &arguments[optind]);
            fprintf(stderr, "vpmu-callstacks: %s: %s\n", arguments[optind], strerror(errno));
            _exit(errno == ENOENT ? 127 : 126);
        }
        root = child;
        /* Both get the terminal's; the command decides. */
        signal(SIGINT, SIG_IGN);
        signal(SIGQUIT, SIG_IGN);
    }
    /* A program maps its libraries one after the other: after a new one, the next is looked for soon. */
    long next = 1;

    for (;;) {
        next = descendants(root) ? 1 : next * 2 < interval ? next * 2 : interval;
        struct timespec pause = { next / 1000, next % 1000 * 1000000 };

        if (child && waitpid(child, &status, WNOHANG) == child)
            break;
        if (root && !child && is_gone(root))
            break;
        nanosleep(&pause, NULL);
    }
    if (verbose)
        fprintf(stderr, "vpmu-callstacks: %lu pages of %lu objects\n", pages, objects);
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}
