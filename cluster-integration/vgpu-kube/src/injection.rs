//! What a container gets of a vGPU: the folder with its sockets, libraries and environment
//! variables. No device node.

use std::path::{Path, PathBuf};

use vgpud_api::Vgpu;
use vgpud_host::preload::{LIBRARY, SOCKET_VARIABLE};

use crate::host::{LIBRARY_FOLDERS, Libraries};

/// Folder of vGPUs in a container. Each has a subfolder, with the name of the claim's request.
pub const FOLDER: &str = "/run/tessera";
/// Name of a vGPU's subfolder where there is no request.
pub const DEFAULT_NAME: &str = "vgpu";
/// Folder of the preload library in a container.
const LIBRARY_FOLDER: &str = "/usr/lib/tessera";

/// Read-only bind mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Path on the host.
    pub host: PathBuf,
    /// Path in the container.
    pub container: PathBuf,
}

/// Changes to a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Injection {
    /// Environment variables.
    pub env: Vec<(&'static str, String)>,
    /// Mounts.
    pub mounts: Vec<Mount>,
}

impl Injection {
    /// Returns the changes to a container that gets a running vGPU. `name` is the subfolder of
    /// [`FOLDER`]. Returns `None` if the vGPU does not run.
    pub fn new(vgpu: &Vgpu, name: &str, libraries: &Libraries) -> Option<Self> {
        let own = Path::new(vgpu.socket.as_ref()?).parent()?;
        let clients = own.join("clients");
        let folder = Path::new(FOLDER).join(name);
        let mut injection = Self::default();
        let serves_programs = own.join("cuda.sock").exists();
        injection.mounts.push(Mount { host: clients, container: folder.clone() });
        if let Some(preload) = libraries.preload.as_ref().filter(|_| serves_programs) {
            let inside = Path::new(LIBRARY_FOLDER).join(LIBRARY);
            let socket = folder.join("cuda.sock");
            injection.env.push((SOCKET_VARIABLE, socket.to_string_lossy().into_owned()));
            injection.env.push(("LD_PRELOAD", inside.to_string_lossy().into_owned()));
            injection.mounts.push(Mount { host: preload.clone(), container: inside });
            for host in &libraries.driver {
                let Some(file) = host.file_name() else { continue };
                let inside = LIBRARY_FOLDERS.map(|folder| Path::new(folder).join(file));
                let mounts = inside.map(|container| Mount { host: host.clone(), container });
                injection.mounts.extend(mounts);
            }
        }
        Some(injection)
    }
}
