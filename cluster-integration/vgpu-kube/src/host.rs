//! The agent's view of the host: libraries for containers.

use std::path::{Path, PathBuf};

use vgpud_host::preload;

/// NVIDIA's user-mode libraries that a CUDA program loads, if the host has them.
const DRIVER_LIBRARIES: [&str; 4] =
    ["libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1", "libnvidia-nvvm.so.4"];

/// Folders of libraries on hosts, and in images: those of Debian's and of Fedora's loader.
pub const LIBRARY_FOLDERS: [&str; 2] = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64"];

/// Libraries of the host that a container gets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Libraries {
    /// The preload library. Without it, containers get the vGPU's sockets only.
    pub preload: Option<PathBuf>,
    /// NVIDIA's user-mode libraries.
    pub driver: Vec<PathBuf>,
}

impl Libraries {
    /// Finds the libraries. `named` is the path of the preload library on the command line.
    pub fn find(named: Option<&Path>) -> Self {
        Self::in_root(Path::new("/"), named.map(Path::to_owned).or_else(preload::installed))
    }

    /// Finds NVIDIA's libraries below `root`.
    pub fn in_root(root: &Path, preload: Option<PathBuf>) -> Self {
        let find = |name: &str| {
            let paths = LIBRARY_FOLDERS.iter().map(|folder| Path::new(folder).join(name));
            paths
                .into_iter()
                .find(|path| path.strip_prefix("/").is_ok_and(|path| root.join(path).is_file()))
        };
        Self { preload, driver: DRIVER_LIBRARIES.iter().filter_map(|name| find(name)).collect() }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn libraries_of_the_driver_are_found_where_loaders_look() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(Libraries::in_root(root.path(), None), Libraries::default());
        for path in ["usr/lib64/libcuda.so.1", "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"] {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let found = Libraries::in_root(root.path(), Some("/opt/lib.so".into()));
        let expected = ["/usr/lib64/libcuda.so.1", "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"];
        assert_eq!(found.driver, expected.map(PathBuf::from));
        assert_eq!(found.preload, Some("/opt/lib.so".into()));
    }
}
