#!/bin/sh
# First process of the guest. Loads the kernel's display driver, prints a summary on the screen, and
# then runs the host's commands from the second serial port (see guest.rs).
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

. /agent.sh
