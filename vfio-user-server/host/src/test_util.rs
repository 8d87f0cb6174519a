//! Helpers of other crates' tests.

use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// Writes a program and makes it executable for all users.
///
/// Another process writes the file. If this one did, a child that another thread forks meanwhile
/// would hold the file open for writing, and running the program would fail with ETXTBSY.
pub fn write_executable(path: &Path, content: &str) -> io::Result<()> {
    let mut install = Command::new("install")
        .args(["-m", "755", "/dev/stdin"])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()?;
    let stdin = install.stdin.take();
    stdin.map_or(Ok(()), |mut stdin| stdin.write_all(content.as_bytes()))?;
    let status = install.wait()?;
    if !status.success() {
        return Err(io::Error::other(format!("Cannot write {}: {status}", path.display())));
    }
    Ok(())
}
