#!/bin/sh
# The guest's first process. It loads the kernel's own display driver, says on the screen what it found, and then runs
# the host's commands, which arrive on the second serial port (see guest.rs).
export PATH=/bin HOME=/
/bin/busybox --install -s /bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
mount -t tmpfs none /tmp

while read -r module; do insmod "/modules/$module.ko"; done < /modules/order

name=$(sed -n 's/.*lab\.name=\([^ ]*\).*/\1/p' /proc/cmdline)
banner() {
    printf '\033[2J\033[H\033[?25l\n'
    printf '  TESSERA LAB   VM %s\n\n' "$name"
    printf '  Kernel   %s\n' "$(uname -sr)"
    printf '  Memory   %s\n' "$(sed -n 's/MemTotal: *//p' /proc/meminfo)"
    printf '  Screen   %s at %s pixels\n' "$(cut -d' ' -f2 /proc/fb)" \
        "$(tr , x < /sys/class/graphics/fb0/virtual_size)"
    for device in /sys/bus/pci/devices/*; do
        driver=none
        [ -e "$device/driver" ] && driver=$(basename "$(readlink "$device/driver")")
        printf '  PCI      %s  %s:%s  driver %s\n' "${device##*/}" \
            "$(cut -c3- "$device/vendor")" "$(cut -c3- "$device/device")" "$driver"
    done
    printf '\n'
    dmesg | grep -E 'drm|fbcon|bochs' | tail -n 12
    printf '\n  Commands arrive on the second serial port.\n'
}
if [ -e /sys/class/graphics/fb0 ]; then
    echo 0 > /sys/class/graphics/fbcon/cursor_blink
    banner > /dev/tty0
fi

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
