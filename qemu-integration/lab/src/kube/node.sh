# First process of a cluster's node. $1 is the prepared root, $2 a scratch folder. Written files stay
# in memory.
set -e
read -r pid rest < /proc/self/stat
scratch=$2
mount -t tmpfs -o mode=755 tmpfs "$scratch/machine"
cd "$scratch/machine"
mkdir upper work root
mount -t overlay overlay -o "lowerdir=$1,upperdir=upper,workdir=work" root
cd root
mkdir -p proc sys dev run tmp old var/log var/lib/containerd var/lib/etcd var/lib/kubelet
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -t tmpfs -o mode=755 tmpfs run
rm -rf var/run
ln -s /run var/run
# On the overlay itself, containerd cannot make overlays of images.
for folder in containerd etcd kubelet; do mount -t tmpfs tmpfs "var/lib/$folder"; done

mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
# kubelet wants these values. The host keeps its own.
mkdir run/sysctl
while read -r name value; do
    file="run/sysctl/$(echo "$name" | tr / .)"
    echo "$value" > "$file"
    mount --bind "$file" "proc/sys/$name"
done <<END
vm/overcommit_memory 1
vm/panic_on_oom 0
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxkeys 1000000
kernel/keys/root_maxbytes 25000000
END

mount -t sysfs -o ro sysfs sys
mount -t tmpfs -o mode=755 tmpfs sys/fs/cgroup
shift 2
for controller; do
    mkdir "sys/fs/cgroup/$controller"
    mount -t cgroup -o "$controller" cgroup "sys/fs/cgroup/$controller"
done

mount -t tmpfs -o mode=755 tmpfs dev
for device in null zero full random urandom tty; do
    touch "dev/$device"
    mount --bind "/dev/$device" "dev/$device"
done
# kubelet reads the kernel's log, which is the host's.
touch dev/kmsg
mount --bind /dev/null dev/kmsg
mkdir dev/pts dev/shm dev/mqueue
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t mqueue mqueue dev/mqueue
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s fd/0 dev/stdin
ln -s fd/1 dev/stdout
ln -s fd/2 dev/stderr

ip link set lo up
# The apiserver refuses to be reached by a loopback address.
ip address add 10.99.0.1/32 dev lo
hostname node1
echo node1 > etc/hostname
: > etc/resolv.conf
printf '127.0.0.1 localhost\n10.99.0.1 node1\n' > etc/hosts

# runc needs a root that is a mount point of its namespace, which chroot does not make.
mount --make-rprivate /
pivot_root . old
echo "$pid" > "old$scratch/pid.new"
mv "old$scratch/pid.new" "old$scratch/pid"
mount --make-rshared /
umount -l /old
# Reaps the processes that containerd leaves behind.
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin sh -c 'while :; do sleep 3600 & wait $!; done'
