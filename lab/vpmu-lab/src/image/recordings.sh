# Prints the files that perf has written since the command began, wherever they are (perf record -o FILE), by their first
# word. A file that perf set aside for a newer one is not among them.
recordings() {
    find / /dev/shm /tmp /run -xdev \( -path /usr -o -path /proc -o -path /sys \) -prune -o \
        -type f -newer /vpmu/begun ! -name '*.old' -print 2>/dev/null | sort -u |
        while read -r file; do
            [ "$(head -c 8 "$file" | tr -d '\0')" != PERFILE2 ] || echo "$file"
        done
}
