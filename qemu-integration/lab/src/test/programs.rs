//! Test programs as cargo builds them, and their split into jobs.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::jobs::Job;
use crate::build::{PREBUILT, cargo, workspace};

/// Everything that one run of cargo has built.
#[derive(Debug, Default)]
pub struct Built {
    tests: Vec<TestProgram>,
    /// Folder of `vgpud` and `vgpuctl`.
    programs: PathBuf,
}

/// A program of tests.
#[derive(Debug)]
struct TestProgram {
    package: String,
    target: String,
    folder: PathBuf,
    executable: PathBuf,
}

/// All tests as jobs.
#[derive(Debug, Default)]
pub struct Plan {
    /// Jobs that boot VMs.
    pub with_vms: Vec<Job>,
    /// Jobs that boot no VMs.
    pub without_vms: Vec<Job>,
    /// Jobs that measure.
    pub measured: Vec<Job>,
    /// Jobs that take long.
    pub long: Vec<Job>,
}

impl Built {
    /// Builds all programs and tests.
    ///
    /// One command builds both, so that cargo resolves features once. Tests would otherwise build
    /// the programs again.
    pub fn build() -> Result<Self> {
        let mut command = cargo();
        command.args(["build", "--quiet", "--workspace", "--bins", "--tests", "--examples"]);
        command.arg("--message-format=json-render-diagnostics");
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().context("Cannot run cargo")?;
        let mut built = Built::default();
        for line in child.stdout.take().into_iter().flat_map(|out| BufReader::new(out).lines()) {
            let message: Value = serde_json::from_str(&line?).unwrap_or_default();
            built.add(&message);
        }
        if !child.wait()?.success() {
            bail!("The tests do not build");
        }
        built.tests.sort_by(|a, b| (&a.folder, &a.target).cmp(&(&b.folder, &b.target)));
        Ok(built)
    }

    /// Returns jobs of the tests that `package/program/prefix` names: those whose names begin with
    /// the prefix, or all of the program. They run one test at a time, with VMs or without.
    pub fn jobs_of(&self, name: &str) -> Vec<Job> {
        let mut parts = name.splitn(3, '/');
        let (package, target) = (parts.next(), parts.next());
        let prefix = parts.next().unwrap_or_default();
        let programs = self.tests.iter().filter(|program| {
            (Some(program.package.as_str()), Some(program.target.as_str())) == (package, target)
        });
        programs.filter_map(|program| program.job_of(name, prefix, &self.programs)).collect()
    }

    /// Adds the program of one of cargo's messages, if the message reports a program.
    fn add(&mut self, message: &Value) {
        let Some(executable) = message["executable"].as_str().map(PathBuf::from) else { return };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let target = text(&message["target"]["name"]);
        if message["profile"]["test"] == true {
            let manifest = PathBuf::from(text(&message["manifest_path"]));
            let folder = manifest.parent().unwrap_or(workspace()).to_path_buf();
            let id = text(&message["package_id"]);
            let package = package_name(id.rsplit('/').next().unwrap_or_default(), &folder);
            self.tests.push(TestProgram { package, target, folder, executable });
        } else if target == "vgpud" {
            self.programs = executable.parent().unwrap_or(&executable).to_path_buf();
        }
    }

    /// Splits all tests into jobs. `measured` names those that measure, `long` modules of those
    /// that take long, and `first` those that start before others.
    pub fn plan(&self, measured: &[&str], long: &[&str], first: &[&str]) -> Plan {
        let mut plan = Plan::default();
        for program in &self.tests {
            program.plan(&self.programs, measured, long, &mut plan);
        }
        let titles: Vec<_> = first.iter().map(|name| title_of(name)).collect();
        let place = |job: &Job| titles.iter().position(|title| *title == job.title);
        plan.with_vms.sort_by_key(|job| place(job).unwrap_or(titles.len()));
        plan
    }
}

impl TestProgram {
    /// Adds the jobs of this program: one for all its plain tests, and one for each module of tests
    /// that boot VMs.
    fn plan(&self, programs: &Path, measured: &[&str], long: &[&str], plan: &mut Plan) {
        let title = format!("{}: {}", self.package, self.target);
        let name = format!("{}/{}", self.package, self.target);
        let alone = |module: &str| {
            measured.contains(&name.as_str())
                || measured.contains(&format!("{name}/{module}").as_str())
        };
        let ignored = self.list(&["--ignored"]);
        let all = self.list(&[]);
        let plain: Vec<_> = all.into_iter().filter(|test| !ignored.contains(test)).collect();
        // Tests without VMs of modules that measure, and the others.
        let (mine, others): (Vec<_>, Vec<_>) =
            plain.iter().map(String::as_str).partition(|test| alone(module_of(test)));
        let left_out = u32::try_from(ignored.len()).unwrap_or(u32::MAX);
        if !others.is_empty() {
            let skipped = mine.iter().flat_map(|test| ["--skip", test]);
            let args: Vec<_> = if mine.is_empty() { Vec::new() } else { vec!["--exact"] };
            let args: Vec<_> = args.into_iter().chain(skipped).collect();
            let command = self.command(programs, &args);
            plan.without_vms.push(Job { ignored: left_out, ..Job::new(title.clone(), command) });
        }
        if !mine.is_empty() {
            let title = if others.is_empty() { title } else { format!("{title}, what measures") };
            let args = ["--test-threads=1", "--exact"].into_iter().chain(mine);
            let command = self.command(programs, &args.collect::<Vec<_>>());
            plan.measured.push(Job::new(title, command));
        }
        // `cargo test` ignores tests that boot VMs. Tests of one module share VMs or a machine.
        for (module, tests) in modules(&ignored) {
            // By whole names: libtest's filters match any part of a name.
            let args = ["--ignored", "--test-threads=1", "--exact"];
            let args: Vec<_> = args.into_iter().chain(tests).collect();
            let full = format!("{name}/{module}");
            let job = Job::new(title_of(&full), self.command(programs, &args));
            let jobs = if long.contains(&full.as_str()) {
                &mut plan.long
            } else if alone(module) {
                &mut plan.measured
            } else {
                &mut plan.with_vms
            };
            jobs.push(job);
        }
    }

    /// Returns a job of the tests whose names begin with `prefix`, if there are any.
    fn job_of(&self, title: &str, prefix: &str, programs: &Path) -> Option<Job> {
        let tests = self.list(&[]);
        let tests: Vec<_> = tests.iter().filter(|test| test.starts_with(prefix)).collect();
        let args = ["--include-ignored", "--test-threads=1", "--exact"].into_iter();
        let args: Vec<_> = args.chain(tests.iter().map(|test| test.as_str())).collect();
        (!tests.is_empty()).then(|| Job::new(title, self.command(programs, &args)))
    }

    fn command(&self, programs: &Path, args: &[&str]) -> Command {
        let mut command = Command::new(&self.executable);
        command.args(args).current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        command.env(PREBUILT, programs);
        command
    }

    /// Returns the names of tests: all, or the ignored ones only.
    fn list(&self, args: &[&str]) -> Vec<String> {
        let mut list = Command::new(&self.executable);
        list.args(["--list", "--format", "terse"]).args(args).stdin(Stdio::null());
        let output = list.output().map(|output| output.stdout).unwrap_or_default();
        let text = String::from_utf8_lossy(&output);
        text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
    }
}

/// Returns the title of the job of a module with VMs: of `package/program/module`.
pub fn title_of(name: &str) -> String {
    let mut parts = name.splitn(3, '/');
    let mut part = || parts.next().unwrap_or_default();
    format!("{}: {}, {} with VMs", part(), part(), part())
}

/// Returns the outermost module of a test, or nothing for a test without one.
fn module_of(test: &str) -> &str {
    test.split_once("::").map_or("", |(module, _)| module)
}

/// Returns the outermost modules of tests, each with its tests.
fn modules(tests: &[String]) -> BTreeMap<&str, Vec<&str>> {
    let mut modules: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for test in tests {
        if let Some((module, _)) = test.split_once("::") {
            modules.entry(module).or_default().push(test.as_str());
        }
    }
    modules
}

/// Returns the package's name from the last part of a package id.
///
/// The id ends with `mdev-core#0.1.0`, or `tests#system-tests@0.1.0` if folder and name differ.
fn package_name(id: &str, folder: &Path) -> String {
    let name = id.split_once('#').and_then(|(_, rest)| rest.split_once('@'));
    let name = name.map(|(name, _)| name.to_owned());
    name.unwrap_or_else(|| folder.file_name().unwrap_or_default().to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_have_the_names_that_their_manifests_give() {
        let folder = Path::new("/x/tests");
        assert_eq!(package_name("tests#system-tests@0.1.0", folder), "system-tests");
        assert_eq!(package_name("mdev-core#0.1.0", Path::new("/x/mdev-core")), "mdev-core");
    }

    #[test]
    fn tests_are_grouped_by_their_outermost_module() {
        let tests = ["dma::a", "access::b", "dma::deep::c", "in_dma::d"].map(str::to_owned);
        let expected = [
            ("access", vec!["access::b"]),
            ("dma", vec!["dma::a", "dma::deep::c"]),
            ("in_dma", vec!["in_dma::d"]),
        ];
        assert_eq!(modules(&tests), BTreeMap::from(expected));
    }
}
