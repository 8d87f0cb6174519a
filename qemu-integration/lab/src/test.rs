//! `cargo lab test`: every test there is, in the order in which a failure says most.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::Lab;
use crate::build::{cargo, workspace};
use crate::kvm;
use crate::progress::Progress;

/// Test programs that boot VMs; they come last, since they take longest.
const WITH_QEMU: [&str; 11] = [
    "browser",
    "bundle",
    "libvirt",
    "package",
    "qemu",
    "vfio",
    "vfio_display",
    "vfio_dma",
    "vfio_guest",
    "vfio_service",
    "vfio_shares",
];

/// Test programs that measure who gets how much: their tests would take the CPUs from one another.
const ONE_BY_ONE: [&str; 2] = ["stranger", "work"];

/// Tests that were run, and how they went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// As promised.
    pub passed: u32,
    /// Not so.
    pub failed: u32,
    /// Not run: what they need is not there.
    pub skipped: u32,
}

impl Tally {
    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

    fn check(passed: bool) -> Self {
        Self { passed: passed.into(), failed: (!passed).into(), skipped: 0 }
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// A program of tests.
#[derive(Debug)]
struct TestProgram {
    package: String,
    target: String,
    folder: PathBuf,
    executable: PathBuf,
}

/// Runs everything.
pub fn run() -> Tally {
    let mut sections: Vec<(String, Tally, f64)> = Vec::new();
    let mut section = |title: String, body: &mut dyn FnMut() -> Result<Tally>| {
        heading(&title);
        let start = Instant::now();
        // What could not even be tried has failed; the rest is tried all the same.
        let tally = body().unwrap_or_else(|error| {
            println!("error: {error:#}");
            Tally::check(false)
        });
        sections.push((title, tally, start.elapsed().as_secs_f64()));
    };
    section("Formatting".to_owned(), &mut || check(&["fmt", "--all", "--check"]));
    section("Lints".to_owned(), &mut || {
        check(&["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"])
    });
    let mut programs = Vec::new();
    section("Building the tests".to_owned(), &mut || {
        programs = build()?;
        Ok(Tally::default())
    });
    let (with_qemu, without): (Vec<_>, Vec<_>) =
        programs.into_iter().partition(|program| WITH_QEMU.contains(&program.target.as_str()));
    for program in &without {
        let alone = ONE_BY_ONE.contains(&program.target.as_str());
        let args: &[&str] = if alone { &["--test-threads=1"] } else { &[] };
        section(title(program), &mut || test(program, args));
    }
    section("Examples in the documentation".to_owned(), &mut || {
        let mut command = cargo();
        command.args(["test", "--quiet", "--doc", "--workspace"]);
        follow(command)
    });
    section("The lab: QEMU and a guest's kernel".to_owned(), &mut prepare);
    for program in &with_qemu {
        let args = ["--include-ignored", "--test-threads=1"];
        section(title(program), &mut || test(program, &args));
    }

    heading("Summary");
    let mut total = Tally::default();
    for (title, tally, seconds) in &sections {
        total.add(*tally);
        let mark = if tally.failed > 0 { "FAILED" } else { "ok" };
        println!("{mark:6}  {seconds:6.1} s  {title}: {tally}");
    }
    println!();
    println!("{total}");
    total
}

fn title(program: &TestProgram) -> String {
    format!("{}: {}", program.package, program.target)
}

fn heading(title: &str) {
    println!("\n== {title} ==");
    let _ = std::io::stdout().flush();
}

/// A cargo command that is right or wrong as a whole.
fn check(args: &[&str]) -> Result<Tally> {
    let status = cargo().args(args).stdin(Stdio::null()).status().context("Cannot run cargo")?;
    Ok(Tally::check(status.success()))
}

/// The lab itself, and what this machine lacks for more.
fn prepare() -> Result<Tally> {
    let progress = Progress::new();
    let lab = Lab::open(&progress)?;
    println!("QEMU {}", lab.root.qemu.version);
    let mut tally = Tally::default();
    let mut skip = |what: &str, reason: &str| {
        println!("skipped: {what}: {reason}");
        tally.skipped += 1;
    };
    if let Err(reason) = kvm::probe(&lab, &progress)? {
        skip("VMs under KVM", &reason);
    }
    if !Path::new("/dev/nvidiactl").exists() {
        skip("vGPUs of an NVIDIA GPU", "/dev/nvidiactl is not there");
    }
    Ok(tally)
}

/// Builds all test programs.
fn build() -> Result<Vec<TestProgram>> {
    let mut command = cargo();
    command.args(["test", "--quiet", "--workspace", "--no-run", "--message-format"]);
    command.arg("json-render-diagnostics").stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().context("Cannot run cargo")?;
    let mut programs = Vec::new();
    for line in child.stdout.take().into_iter().flat_map(|out| BufReader::new(out).lines()) {
        let message: Value = serde_json::from_str(&line?).unwrap_or_default();
        if message["profile"]["test"] == true
            && let Some(executable) = message["executable"].as_str()
        {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let manifest = PathBuf::from(text(&message["manifest_path"]));
            let folder = manifest.parent().unwrap_or(workspace()).to_path_buf();
            let package = text(&message["package_id"]);
            let package = package.rsplit('/').next().unwrap_or_default();
            programs.push(TestProgram {
                package: package_name(package, &folder),
                target: text(&message["target"]["name"]),
                folder,
                executable: PathBuf::from(executable),
            });
        }
    }
    if !child.wait()?.success() {
        bail!("The tests do not build");
    }
    programs.sort_by(|a, b| (&a.folder, &a.target).cmp(&(&b.folder, &b.target)));
    Ok(programs)
}

/// The name in a package id's end: `mdev-core#0.1.0`, or `tests#system-tests@0.1.0` where folder and name differ.
fn package_name(id: &str, folder: &Path) -> String {
    let name = id.split_once('#').and_then(|(_, rest)| rest.split_once('@'));
    let name = name.map(|(name, _)| name.to_owned());
    name.unwrap_or_else(|| folder.file_name().unwrap_or_default().to_string_lossy().into_owned())
}

fn test(program: &TestProgram, args: &[&str]) -> Result<Tally> {
    let mut command = Command::new(&program.executable);
    command.args(args).current_dir(&program.folder).env("CARGO_MANIFEST_DIR", &program.folder);
    follow(command)
}

/// Runs tests, shows what they print, and adds up their result lines.
fn follow(mut command: Command) -> Result<Tally> {
    let (reader, writer) = std::io::pipe().context("Cannot make a pipe")?;
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    let mut child = command.spawn().with_context(|| format!("Cannot run {command:?}"))?;
    // The command holds the pipe's other end: without this, the end of the output would never come.
    drop(command);
    let mut tally = Tally::default();
    let mut lines = BufReader::new(reader);
    let mut line = Vec::new();
    let mut said_skipped = 0;
    while lines.read_until(b'\n', &mut line)? > 0 {
        let text = String::from_utf8_lossy(&line);
        print!("{text}");
        if let Some(result) = parse_result(&text) {
            tally.add(result);
        }
        said_skipped += u32::from(text.starts_with("skipped: "));
        line.clear();
    }
    // libtest has no way for a test to say so while it runs, and counts it as passed.
    let skipped = said_skipped.min(tally.passed);
    tally.passed -= skipped;
    tally.skipped += skipped;
    let status = child.wait()?;
    if !status.success() && tally.failed == 0 {
        println!("The tests ended with {status}");
        tally.failed += 1;
    }
    Ok(tally)
}

/// "test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s"
fn parse_result(line: &str) -> Option<Tally> {
    let (_, counts) = line.trim().strip_prefix("test result: ")?.split_once(". ")?;
    let count = |what: &str| {
        counts.split("; ").find_map(|part| part.strip_suffix(what)?.trim().parse().ok())
    };
    Some(Tally { passed: count("passed")?, failed: count("failed")?, skipped: count("ignored")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_lines_are_read() {
        let line = "test result: FAILED. 5 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s\n";
        assert_eq!(parse_result(line), Some(Tally { passed: 5, failed: 2, skipped: 1 }));
        assert_eq!(parse_result("test a::b ... ok"), None);
    }

    #[test]
    fn a_program_that_dies_without_a_result_has_failed() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo running; exit 3"]);
        assert_eq!(follow(command).unwrap(), Tally { passed: 0, failed: 1, skipped: 0 });
    }

    #[test]
    fn a_test_that_says_it_was_skipped_has_not_passed() {
        let result = "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out";
        let mut command = Command::new("echo");
        command.arg(format!("skipped: no /dev/kvm\n{result}"));
        assert_eq!(follow(command).unwrap(), Tally { passed: 2, failed: 0, skipped: 2 });
    }

    #[test]
    fn packages_have_the_names_that_their_manifests_give() {
        let folder = Path::new("/x/tests");
        assert_eq!(package_name("tests#system-tests@0.1.0", folder), "system-tests");
        assert_eq!(package_name("mdev-core#0.1.0", Path::new("/x/mdev-core")), "mdev-core");
    }
}
