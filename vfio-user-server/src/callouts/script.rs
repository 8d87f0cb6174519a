//! One script, run: what may be run at all, for how long, and what it said.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::spawn;

/// How long a script may take. Whoever asked is waiting for it.
const PATIENCE: Duration = Duration::from_secs(10);
/// How much is read of what it says.
const MAX_SAID: u64 = 64 << 10;

/// What came of it.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It ended.
    Ended {
        /// Its exit status.
        status: i32,
        /// What it said.
        said: Said,
    },
    /// A signal ended it.
    Killed,
    /// It was not run, since somebody else might have written it: why.
    Untrusted(String),
}

/// What a script said.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// Its answer.
    pub stdout: String,
    /// Its complaints.
    pub stderr: String,
}

impl Said {
    /// The first line of its complaints that is not empty.
    pub fn first_line(&self) -> Option<String> {
        let mut lines = self.stderr.lines().map(str::trim).filter(|line| !line.is_empty());
        // A terminal may be where this ends.
        lines
            .next()
            .map(|line| line.chars().take(300).collect::<String>().escape_debug().to_string())
    }
}

/// What could be run in a folder, by name.
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

/// Runs a script, and waits for its end.
pub fn run(path: &Path, args: &[&str], stdin: &str) -> io::Result<Outcome> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    for place in [path, folder, folder.parent().unwrap_or(folder)] {
        if let Some(why) = distrust(place)? {
            return Ok(Outcome::Untrusted(why));
        }
    }
    let ended = spawn::script(path, args, stdin.as_bytes(), PATIENCE, MAX_SAID)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let said = Said { stdout: text(&ended.stdout), stderr: text(&ended.stderr) };
    Ok(match ended.status.code() {
        Some(status) => Outcome::Ended { status, said },
        None => Outcome::Killed,
    })
}

/// Why what is at a path may be somebody else's work. Only root's, or our own, is run.
fn distrust(path: &Path) -> io::Result<Option<String>> {
    let file = fs::metadata(path)?;
    let us = nix::unistd::geteuid().as_raw();
    let path = path.display();
    Ok(if file.uid() != 0 && file.uid() != us {
        Some(format!("{path} belongs to user {}: it is not run; chown root it", file.uid()))
    } else if file.mode() & 0o022 != 0 {
        Some(format!("others can write to {path}: it is not run; chmod go-w it"))
    } else {
        None
    })
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn script(dir: &Path, text: &str) -> PathBuf {
        let folder = dir.join("scripts.d/callouts");
        fs::create_dir_all(&folder).unwrap();
        for folder in [folder.parent().unwrap(), &folder] {
            fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let path = folder.join("script.sh");
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn it_gets_arguments_and_input_and_nothing_of_our_environment() {
        let dir = tempfile::tempdir().unwrap();
        let text = "cat; echo \" $*\"; pwd; env | grep -c -v -e ^PATH= -e ^PWD= -e ^_= -e ^SHLVL= -e ^LANG=; umask; \
                    echo >&2; echo no good >&2; exit 7";
        let path = script(dir.path(), text);
        let Outcome::Ended { status, said } = run(&path, &["-t", "A b"], "{\"x\":1}").unwrap()
        else {
            panic!("it ends");
        };
        assert_eq!((status, said.first_line().as_deref()), (7, Some("no good")));
        assert_eq!(said.stdout, "{\"x\":1} -t A b\n/\n0\n0022\n");
    }

    #[test]
    fn one_that_does_not_end_is_killed_with_all_that_it_started() {
        let dir = tempfile::tempdir().unwrap();
        let path = script(dir.path(), "sleep 60 & sleep 60");
        let begun = Instant::now();
        let ended = spawn::script(&path, &[], b"", Duration::from_millis(200), 10).unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::TimedOut);
        assert!(ended.to_string().contains("it did not end within"), "{ended}");
        assert!(begun.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn what_it_says_is_bounded_and_a_child_that_goes_on_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = script(dir.path(), "sleep 3 & head -c 100000 /dev/zero | tr '\\0' x");
        let begun = Instant::now();
        let ended = spawn::script(&path, &[], b"", PATIENCE, 1000).unwrap();
        assert_eq!(ended.stdout.len(), 1000);
        assert!(begun.elapsed() < Duration::from_secs(3));
    }

    #[test]
    fn what_others_can_write_is_not_run() {
        let dir = tempfile::tempdir().unwrap();
        let path = script(dir.path(), "exit 0");
        assert!(matches!(run(&path, &[], "").unwrap(), Outcome::Ended { status: 0, .. }));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o775)).unwrap();
        let Outcome::Untrusted(why) = run(&path, &[], "").unwrap() else { panic!("it is not run") };
        assert!(why.contains("others can write to") && why.contains("chmod go-w"), "{why}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(path.parent().unwrap(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(run(&path, &[], "").unwrap(), Outcome::Untrusted(_)));
        fs::set_permissions(path.parent().unwrap(), fs::Permissions::from_mode(0o755)).unwrap();
        if nix::unistd::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
            let Outcome::Untrusted(why) = run(&path, &[], "").unwrap() else {
                panic!("it is not run")
            };
            assert!(why.contains("belongs to user 65534"), "{why}");
        }
    }

    #[test]
    fn what_cannot_be_run_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = script(dir.path(), "exit 0");
        let folder = path.parent().unwrap();
        fs::write(folder.join("README"), "no program").unwrap();
        fs::create_dir(folder.join("a-folder")).unwrap();
        assert_eq!(in_folder(folder), std::slice::from_ref(&path));
        assert_eq!(in_folder(&folder.join("none")), Vec::<PathBuf>::new());
    }
}
