//! Files that commands write: `save`, `vm save`, `screenshot`.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use nix::sys::stat::makedev;
use nix::unistd::geteuid;
use tempfile::{NamedTempFile, TempPath};

use crate::failure::Failure;

/// Numbers of `/dev/null`.
const NULL: (u64, u64) = (1, 3);

/// File that gets its name when it is complete, or a pipe or `/dev/null`, which are written into.
/// Such a file is its user's alone: it has what a guest had.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    /// The file's name until it is complete, and the later one.
    names: Option<(TempPath, PathBuf)>,
    /// Name to show.
    name: PathBuf,
    bytes: u64,
}

impl NewFile {
    /// Creates a file beside its later name, or opens what has that name and is no file.
    pub fn create(name: &Path) -> Result<Self, Failure> {
        let new = Self::begin(name);
        new.map_err(|error| Failure::Local(format!("Cannot write {}: {error}", name.display())))
    }

    fn begin(name: &Path) -> io::Result<Self> {
        // Nothing is done to what is opened so, and a link is followed by the kernel's own rules
        // for links of others. A device node must never be replaced: the host uses it.
        let mut found = OpenOptions::new();
        let found = found.read(true).custom_flags(OFlag::O_PATH.bits()).open(name);
        let target = match found {
            Ok(found) => {
                let by_number = format!("/proc/self/fd/{}", found.as_raw_fd());
                let real_name = fs::read_link(&by_number)?;
                let data = found.metadata()?;
                let kind = data.file_type();
                // Another user's pipe in a folder of all would get what a guest had.
                let is_named = real_name.is_absolute();
                if kind.is_fifo() && is_named && data.uid() != geteuid().as_raw() {
                    return Err(io::Error::other("the pipe belongs to another user"));
                }
                let is_null = kind.is_char_device() && data.rdev() == makedev(NULL.0, NULL.1);
                if kind.is_fifo() || is_null {
                    let file = OpenOptions::new().write(true).open(by_number)?;
                    return Ok(Self { file, names: None, name: name.to_owned(), bytes: 0 });
                }
                if !kind.is_file() {
                    return Err(io::Error::other("it is no file, pipe or /dev/null"));
                }
                real_name
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                if fs::symlink_metadata(name).is_ok() {
                    return Err(io::Error::other("it is a link to nothing"));
                }
                name.to_owned()
            }
            Err(error) => return Err(error),
        };
        let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        fs::metadata(folder)?;
        let (file, temporary) = NamedTempFile::with_prefix_in(".vgpu", folder)?.into_parts();
        Ok(Self { file, names: Some((temporary, target)), name: name.to_owned(), bytes: 0 })
    }

    /// Returns the name that the user gave.
    pub fn name(&self) -> &Path {
        &self.name
    }

    /// Writes the file out and gives it its name. Returns its length.
    pub fn finish(self) -> io::Result<u64> {
        if let Some((temporary, later)) = self.names {
            self.file.sync_all()?;
            temporary.persist(later).map_err(|error| error.error)?;
        }
        Ok(self.bytes)
    }
}

impl Write for NewFile {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let written = self.file.write(data)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;
    use std::thread;

    use nix::sys::stat::{Mode, SFlag, mknod};
    use nix::unistd::{Uid, chown, mkfifo};

    use super::*;

    fn write(name: &Path) -> Result<u64, String> {
        let mut file = NewFile::create(name).map_err(|error| error.to_string())?;
        file.write_all(b"saved").unwrap();
        Ok(file.finish().unwrap())
    }

    #[test]
    fn a_file_is_replaced_when_it_is_complete_also_behind_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let (name, link) = (dir.path().join("file"), dir.path().join("link"));
        symlink("file", &link).unwrap();
        let refused = write(&link).unwrap_err();
        assert!(refused.ends_with("link: it is a link to nothing"), "{refused}");
        fs::write(&name, "before").unwrap();
        for given in [&name, &link] {
            fs::write(&name, "before").unwrap();
            let mut file = NewFile::create(given).unwrap();
            file.write_all(b"saved").unwrap();
            assert_eq!(fs::read(&name).unwrap(), b"before");
            assert_eq!(file.finish().unwrap(), 5);
            assert_eq!(fs::read(&name).unwrap(), b"saved");
        }
        assert!(link.is_symlink());
        assert_eq!(fs::metadata(&name).unwrap().mode() & 0o777, 0o600);
        drop(NewFile::create(&name).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "nothing else is left");
    }

    #[test]
    fn a_pipe_is_written_into() {
        let dir = tempfile::tempdir().unwrap();
        let name = dir.path().join("pipe");
        mkfifo(&name, Mode::S_IRWXU).unwrap();
        let reader = {
            let name = name.clone();
            thread::spawn(move || {
                let mut text = String::new();
                File::open(name).unwrap().read_to_string(&mut text).unwrap();
                text
            })
        };
        assert_eq!(write(&name), Ok(5));
        assert_eq!(reader.join().unwrap(), "saved");
        if chown(&name, Some(Uid::from_raw(65534)), None).is_ok() {
            let refused = write(&name).unwrap_err();
            assert!(refused.ends_with("pipe: the pipe belongs to another user"), "{refused}");
        }
        assert!(fs::metadata(&name).unwrap().file_type().is_fifo());
    }

    #[test]
    fn a_pipe_without_a_name_is_written_into() {
        let (mut reader, writer) = io::pipe().unwrap();
        let name = format!("/proc/self/fd/{}", writer.as_raw_fd());
        assert_eq!(write(Path::new(&name)), Ok(5));
        drop(writer);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "saved");
    }

    #[test]
    fn devices_stay_and_all_but_null_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let node = |name: &str, major, minor| {
            let path = dir.path().join(name);
            let made = mknod(&path, SFlag::S_IFCHR, Mode::S_IRWXU, makedev(major, minor));
            made.is_ok().then_some(path)
        };
        // Nodes of its own, which only root can make: a fault must not harm those of the host.
        if let (Some(null), Some(zero)) = (node("null", 1, 3), node("zero", 1, 5)) {
            // A file system that admits no devices refuses to open them.
            if File::open(&null).is_ok() {
                assert_eq!(write(&null), Ok(5));
            }
            write(&zero).unwrap_err();
            for node in [null, zero] {
                assert!(fs::metadata(&node).unwrap().file_type().is_char_device());
            }
        }
        let socket = dir.path().join("socket");
        let _listener = UnixListener::bind(&socket).unwrap();
        for other in [socket.as_path(), dir.path()] {
            let refused = write(other).unwrap_err();
            let expected =
                format!("Cannot write {}: it is no file, pipe or /dev/null", other.display());
            assert_eq!(refused, expected);
        }
        assert!(fs::metadata(&socket).unwrap().file_type().is_socket());
    }
}
