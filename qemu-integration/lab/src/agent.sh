# A request is one line, "#NUMBER SECONDS COMMAND"; the answer "@NUMBER STATUS OUT-BYTES ERR-BYTES" and those bytes.
serve() {
    stty -F /dev/ttyS1 raw -echo
    exec 3<> /dev/ttyS1
    printf '@boot\n' >&3
    while read -r number seconds command <&3; do
        case $number in '#'*) ;; *) continue ;; esac
        timeout -s KILL "$seconds" sh -c "$command" < /dev/null > /tmp/out 2> /tmp/err 3>&-
        status=$?
        printf '@%s %d %d %d\n' "${number#?}" $status "$(stat -c %s /tmp/out)" \
            "$(stat -c %s /tmp/err)" >&3
        cat /tmp/out /tmp/err >&3
    done
}
# In a process of its own: orphans of a command become children of the first process, and the signal of a child's end
# makes the shell's `read` forget what it has read of a line.
while :; do
    serve
    sleep 1
done &
while :; do
    wait
    sleep 1
done
