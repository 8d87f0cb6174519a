//! A program in a container: namespaces, a root folder and a user of its own. It has the vGPU's
//! socket and nothing else of the host's GPUs.

use std::process::{Command, Output};

use anyhow::{Result, ensure};
use serde_json::json;
use system_tests::{Vgpud, cuda_library, skipped};

use crate::{Gpu, TYPE, libraries};

/// User of the container.
const USER: u32 = 62_400;

/// What the script exits with if the host allows no such container.
const NO_CONTAINER: i32 = 77;

/// Makes a root folder at `$1` and runs the test `$2` there as user `$3`. `$4` to `$7` are the
/// vGPU's socket, the preload library, the folder of NVIDIA's libraries and the test program.
const SCRIPT: &str = r#"
root=$1
mount -t tmpfs none "$root" || exit 77
show() {
    mkdir -p "$(dirname "$root$2")"
    if [ -d "$1" ]; then mkdir -p "$root$2"; else touch "$root$2"; fi
    mount --rbind "$1" "$root$2" || exit 77
}
for folder in usr lib lib64 bin; do
    if [ -L "/$folder" ]; then cp -P "/$folder" "$root/"; else show "/$folder" "/$folder"; fi
done
mkdir -m 755 "$root/proc" "$root/dev" "$root/etc"
mkdir -m 1777 "$root/tmp" "$root/dev/shm"
mount -t proc proc "$root/proc" || exit 77
for node in null zero urandom; do show "/dev/$node" "/dev/$node"; done
show "$4" /run/vgpu.sock
show "$5" /opt/libtessera_cuda.so
show "$6" /opt/cuda
show "$7" /program
exec chroot --userspec="$3:$3" "$root" /usr/bin/env -i TESSERA_TEST_INSIDE=1 \
    LD_PRELOAD=/opt/libtessera_cuda.so TESSERA_CUDA_SOCKET=/run/vgpu.sock LD_LIBRARY_PATH=/opt/cuda \
    /program --exact "$2" --ignored --nocapture
"#;

impl Gpu<'_> {
    /// Runs one of [`crate::inside`] in a container. `None` if the host allows none.
    pub fn run_in_container(&self, name: &str) -> Result<Option<Output>> {
        let root = tempfile::tempdir()?;
        let socket = self.vgpud.vgpu_dir(&self.uuid).join("cuda.sock");
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--fork", "--ipc", "--net", "--uts", "--kill-child"]);
        command.args(["--", "sh", "-c", SCRIPT, "container"]);
        command.arg(root.path()).arg(format!("inside::{name}")).arg(USER.to_string());
        command.arg(socket).arg(cuda_library()?).arg(self.libraries.folder());
        command.arg(std::env::current_exe()?);
        let output = command.output()?;
        let missing = output.status.code() == Some(NO_CONTAINER)
            || String::from_utf8_lossy(&output.stderr).contains("unshare failed");
        Ok((!missing).then_some(output))
    }
}

/// Runs a test on a vGPU of a container's user, if there can be one.
pub fn for_container(test: impl FnOnce(&Gpu<'_>) -> Result<()>) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        skipped("only root makes namespaces without a user namespace");
        return Ok(());
    }
    let Some(libraries) = libraries() else { return Ok(()) };
    let vgpud = Vgpud::start()?;
    let owner = json!([{ "owner": USER.to_string() }]);
    let uuid = vgpud.create(&json!({ "mdev_type": TYPE, "run": true, "attrs": owner }))?;
    test(&Gpu { vgpud: &vgpud, libraries, uuid })
}

#[test]
fn a_program_in_a_container_uses_its_vgpu() -> Result<()> {
    for_container(uses_its_vgpu)
}

fn uses_its_vgpu(gpu: &Gpu<'_>) -> Result<()> {
    for name in ["is_in_a_container", "copies"] {
        let Some(Output { status, stdout, stderr }) = gpu.run_in_container(name)? else {
            skipped("this host allows no namespaces");
            return Ok(());
        };
        let (out, error) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        ensure!(status.success() && out.contains("1 passed"), "{name}: {status}: {out}\n{error}");
    }
    Ok(())
}
