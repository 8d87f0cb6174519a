#!/bin/sh
# First process of a Debian in a VM. Mounts Debian's folder, adds this kernel's modules, and starts
# systemd.
export PATH=/bin HOME=/
/bin/busybox --install -s /bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev

while read -r module; do insmod "/modules/$module.ko"; done < /modules/order
while read -r module; do insmod "/vfio/$module.ko"; done < /vfio/order
mkdir /root
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose root /root

modules=/root/usr/lib/modules/$(uname -r)
if [ ! -e "$modules" ]; then
    mkdir -p "$modules/kernel"
    cp /modules/*.ko /vfio/*.ko "$modules/kernel"
    chroot /root /usr/bin/depmod
fi
umount /proc /sys /dev
exec switch_root /root /usr/lib/systemd/systemd
