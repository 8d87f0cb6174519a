//! Execution of one script: trust checks, time limit and output.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use mdev_core::untrusted::one_line;

use crate::spawn;

/// Time limit of a script. The client waits for it.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Limit of symbolic links to a script.
const MAX_LINKS: usize = 16;
/// Bit of a directory's mode: only their owners can remove or replace the files in it.
const STICKY: u32 = 0o1000;
/// Limit of a script's output, in bytes.
const MAX_OUTPUT: u64 = 64 << 10;

/// Outcome of running a script.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The script exited.
    Exited {
        /// Exit status.
        status: i32,
        /// Output.
        output: Output,
    },
    /// A signal killed the script.
    Killed,
    /// The script was not run, because another user can write to it. The string is the reason.
    Untrusted(String),
}

/// Output of a script.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Output {
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Output {
    /// Returns the first line of standard error that is not empty, escaped and cut to 300
    /// characters.
    pub fn first_line(&self) -> Option<String> {
        let mut lines = self.stderr.lines().map(str::trim).filter(|line| !line.is_empty());
        // The line can end up on a terminal.
        lines.next().map(|line| one_line(line, 300))
    }
}

/// Returns the executable files in a directory, by name.
pub fn in_folder(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<_> =
        entries.map(|entry| entry.path()).filter(|path| is_program(path)).collect();
    paths.sort();
    paths
}

fn is_program(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

/// Runs a script to its end.
pub fn run(path: &Path, args: &[&str], stdin: &str) -> io::Result<Outcome> {
    if let Some(reason) = distrust_any(path)? {
        return Ok(Outcome::Untrusted(reason));
    }
    let ended = spawn::script(path, args, stdin.as_bytes(), TIMEOUT, MAX_OUTPUT)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let output = Output { stdout: text(&ended.stdout), stderr: text(&ended.stderr) };
    Ok(match ended.status.code() {
        Some(status) => Outcome::Exited { status, output },
        None => Outcome::Killed,
    })
}

/// Returns the reason not to trust a script, or a directory above it. With symbolic links, that of
/// any link's target: a user who can write to a directory on the way can replace what is in it.
fn distrust_any(path: &Path) -> io::Result<Option<String>> {
    let mut place = std::path::absolute(path)?;
    for _ in 0..MAX_LINKS {
        let folder = place.parent().unwrap_or(Path::new("/"));
        if let Some(reason) = distrust(folder)? {
            return Ok(Some(reason));
        }
        for above in folder.ancestors().chain(folder.canonicalize()?.ancestors()).skip(1) {
            if let Some(reason) = distrust(above)?.filter(|_| !is_sticky(above)) {
                return Ok(Some(reason));
            }
        }
        match fs::read_link(&place) {
            Ok(target) => place = folder.join(target),
            // No symbolic link.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return distrust(&place),
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::from(nix::errno::Errno::ELOOP))
}

/// Returns whether users can only remove and replace files of their own in a directory of root,
/// such as `/tmp`.
fn is_sticky(folder: &Path) -> bool {
    fs::metadata(folder).is_ok_and(|folder| folder.uid() == 0 && folder.mode() & STICKY != 0)
}

/// Returns the reason not to trust a path: another user than root and this process can write to it.
fn distrust(path: &Path) -> io::Result<Option<String>> {
    let file = fs::metadata(path)?;
    let own = nix::unistd::geteuid().as_raw();
    let path = path.display();
    Ok(if file.uid() != 0 && file.uid() != own {
        Some(format!("{path} belongs to user {} and is not run; chown it to root", file.uid()))
    } else if file.mode() & 0o022 != 0 {
        Some(format!("others can write to {path}, which is not run; chmod go-w it"))
    } else {
        None
    })
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use vgpud_host::test_util::write_executable;

    use super::*;

    fn script(dir: &Path, text: &str) -> PathBuf {
        let folder = dir.join("scripts.d/callouts");
        fs::create_dir_all(&folder).unwrap();
        for folder in [folder.parent().unwrap(), &folder] {
            fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let path = folder.join("script.sh");
        write_executable(&path, &format!("#!/bin/sh\n{text}\n")).unwrap();
        path
    }

    #[test]
    fn script_gets_arguments_and_input_but_not_the_environment() {
        let dir = tempfile::tempdir().unwrap();
        let text = "cat; echo \" $*\"; pwd; env | grep -c -v -e ^PATH= -e ^PWD= -e ^_= -e ^SHLVL= -e ^LANG=; umask; \
                    echo >&2; echo no good >&2; exit 7";
        let path = script(dir.path(), text);
        let Outcome::Exited { status, output } = run(&path, &["-t", "A b"], "{\"x\":1}").unwrap()
        else {
            panic!("killed");
        };
        assert_eq!((status, output.first_line().as_deref()), (7, Some("no good")));
        assert_eq!(output.stdout, "{\"x\":1} -t A b\n/\n0\n0022\n");
    }

    #[test]
    fn script_over_the_time_limit_is_killed_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let path = script(dir.path(), "sleep 60 & sleep 60");
        let begun = Instant::now();
        let ended = spawn::script(&path, &[], b"", Duration::from_millis(200), 10).unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::TimedOut);
        assert!(ended.to_string().contains("it did not end within"), "{ended}");
        assert!(begun.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn output_is_bounded_and_remaining_children_are_not_awaited() {
        let dir = tempfile::tempdir().unwrap();
        let path = script(dir.path(), "sleep 3 & head -c 100000 /dev/zero | tr '\\0' x");
        let begun = Instant::now();
        let ended = spawn::script(&path, &[], b"", TIMEOUT, 1000).unwrap();
        assert_eq!(ended.stdout.len(), 1000);
        assert!(begun.elapsed() < Duration::from_secs(3));
    }

    #[test]
    fn script_that_others_can_write_is_not_run() {
        let dir = tempfile::tempdir().unwrap();
        let path = script(dir.path(), "exit 0");
        assert!(matches!(run(&path, &[], "").unwrap(), Outcome::Exited { status: 0, .. }));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o775)).unwrap();
        let Outcome::Untrusted(reason) = run(&path, &[], "").unwrap() else {
            panic!("the script ran")
        };
        assert!(
            reason.contains("others can write to") && reason.contains("chmod go-w"),
            "{reason}"
        );
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(path.parent().unwrap(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(run(&path, &[], "").unwrap(), Outcome::Untrusted(_)));
        fs::set_permissions(path.parent().unwrap(), fs::Permissions::from_mode(0o755)).unwrap();
        if nix::unistd::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
            let Outcome::Untrusted(reason) = run(&path, &[], "").unwrap() else {
                panic!("the script ran")
            };
            assert!(reason.contains("belongs to user 65534"), "{reason}");
        }
    }

    #[test]
    fn symbolic_links_are_followed_through_trusted_directories_only() {
        let dir = tempfile::tempdir().unwrap();
        let link = script(dir.path(), "exit 0");
        let elsewhere = dir.path().join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        let target = elsewhere.join("target.sh");
        fs::rename(&link, &target).unwrap();
        std::os::unix::fs::symlink("../../elsewhere/target.sh", &link).unwrap();
        let run = || run(&link, &[], "").unwrap();
        assert!(matches!(run(), Outcome::Exited { status: 0, .. }));
        // Another user could exchange the script between the check and its start.
        fs::set_permissions(&elsewhere, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(run(), Outcome::Untrusted(_)));
        // Or lead the link elsewhere.
        let again = elsewhere.join("again.sh");
        std::os::unix::fs::symlink("/bin/true", &again).unwrap();
        fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink(&again, &link).unwrap();
        let Outcome::Untrusted(reason) = run() else { panic!("the script ran") };
        assert!(reason.contains("elsewhere"), "{reason}");
        fs::set_permissions(&elsewhere, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(matches!(run(), Outcome::Exited { status: 0, .. }));
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o775)).unwrap();
        assert!(matches!(run(), Outcome::Untrusted(_)), "the configuration's folder");
    }

    #[test]
    fn files_that_are_not_executable_are_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let path = script(dir.path(), "exit 0");
        let folder = path.parent().unwrap();
        fs::write(folder.join("README"), "no program").unwrap();
        fs::create_dir(folder.join("a-folder")).unwrap();
        assert_eq!(in_folder(folder), std::slice::from_ref(&path));
        assert_eq!(in_folder(&folder.join("none")), Vec::<PathBuf>::new());
    }

    #[test]
    fn script_that_writes_without_end_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let path = script(dir.path(), "yes");
        let ended = spawn::script(&path, &[], b"", Duration::from_secs(600), 10).unwrap_err();
        assert!(ended.to_string().contains("it wrote more than 16 MiB"), "{ended}");
    }
}
