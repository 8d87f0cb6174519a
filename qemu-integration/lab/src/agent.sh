# Each request is one line, "#NUMBER SECONDS COMMAND". The answer is "@NUMBER STATUS OUT-BYTES
# ERR-BYTES", followed by those bytes.
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
# Runs in a separate process: orphans of a command become children of the first process, and SIGCHLD
# would make the shell's `read` lose partial input.
while :; do
    serve
    sleep 1
done &
while :; do
    wait
    sleep 1
done
