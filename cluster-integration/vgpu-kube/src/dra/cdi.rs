//! Files of the Container Device Interface: one for each prepared claim.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use mdev_core::ids::VgpuId;
use mdev_core::untrusted::{TABLE, read_whole};
use serde_json::{Value, json};

use super::{DRIVER, records};
use crate::injection::Injection;

/// Vendor and class of the devices.
const KIND: &str = "gpu.tessera.dev/claim";
/// Version of the interface: the first with all that the files use.
const VERSION: &str = "0.5.0";

/// Folder of files, which the container runtime reads.
#[derive(Clone, Debug)]
pub struct CdiDir {
    folder: PathBuf,
}

/// Returns the name by which the container runtime finds the device of a vGPU.
pub fn device_id(vgpu: VgpuId) -> String {
    format!("{KIND}={vgpu}")
}

impl CdiDir {
    /// Opens a folder, which is created if it is missing.
    pub fn open(folder: &Path) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        Ok(Self { folder: folder.to_owned() })
    }

    /// Writes the file of a claim.
    pub fn write(&self, uid: &str, devices: &[(VgpuId, Injection)]) -> io::Result<()> {
        let devices: Vec<_> =
            devices.iter().map(|(id, injection)| device(*id, injection)).collect();
        let file = json!({ "cdiVersion": VERSION, "kind": KIND, "devices": devices });
        let bytes = serde_json::to_vec_pretty(&file)?;
        let path = self.path(uid);
        if read_whole(&path, TABLE).is_ok_and(|current| current == bytes) {
            return Ok(());
        }
        records::write(&self.folder, &path, &bytes)
    }

    /// Removes the file of a claim, if it is there.
    pub fn remove(&self, uid: &str) -> io::Result<()> {
        records::remove(&self.path(uid))
    }

    /// Returns the UIDs of all claims with a file.
    pub fn claims(&self) -> io::Result<Vec<String>> {
        let mut claims = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let name = entry?.file_name();
            let uid = name
                .to_str()
                .and_then(|name| name.strip_prefix(&format!("{DRIVER}-"))?.strip_suffix(".json"));
            claims.extend(uid.map(str::to_owned));
        }
        Ok(claims)
    }

    fn path(&self, uid: &str) -> PathBuf {
        self.folder.join(format!("{DRIVER}-{uid}.json"))
    }
}

fn device(id: VgpuId, injection: &Injection) -> Value {
    let env: Vec<_> = injection.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let mounts = injection.mounts.iter().map(|mount| {
        json!({
            "hostPath": mount.host, "containerPath": mount.container,
            "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
        })
    });
    let mounts: Vec<_> = mounts.collect();
    json!({ "name": id.to_string(), "containerEdits": { "env": env, "mounts": mounts } })
}
