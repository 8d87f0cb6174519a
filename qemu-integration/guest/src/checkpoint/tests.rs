//! The agent with a host and processes of the test.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;

use mdev_core::abi::control::CheckpointState;

use super::agent::{Agent, Host};
use super::users::find;
use super::*;

/// State of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    Locked,
    Checkpointed,
}

/// Processes, of which one may refuse a step.
#[derive(Debug, Default)]
struct Programs {
    states: RefCell<BTreeMap<u32, State>>,
    refuses: RefCell<Option<(u32, Step)>>,
}

impl Programs {
    fn start(&self, pids: impl IntoIterator<Item = u32>) {
        self.states.borrow_mut().extend(pids.into_iter().map(|pid| (pid, State::Running)));
    }

    fn all_are(&self, state: State) -> bool {
        self.states.borrow().values().all(|other| *other == state)
    }
}

impl Steps for Programs {
    fn step(&self, step: Step, pid: u32) -> Result<(), String> {
        let mut states = self.states.borrow_mut();
        let state = states.get_mut(&pid).ok_or("no such process")?;
        if *self.refuses.borrow() == Some((pid, step)) {
            return Err("operation not supported".to_owned());
        }
        *state = match (step, *state) {
            (Step::Lock, State::Running) | (Step::Restore, State::Checkpointed) => State::Locked,
            (Step::Checkpoint, State::Locked) => State::Checkpointed,
            (Step::Unlock, State::Locked) => State::Running,
            (step, state) => panic!("{step} of process {pid}, which is {state:?}"),
        };
        Ok(())
    }
}

/// A host whose requests are given.
#[derive(Debug)]
struct FakeHost<'a> {
    programs: &'a Programs,
    requests: VecDeque<bool>,
    answers: Vec<(CheckpointState, String)>,
    /// Name of the processes.
    name: String,
    /// Processes that use the vGPU although they are checkpointed.
    keeping: Vec<u32>,
    /// Processes that begin to use the vGPU when the agent is done.
    late: Vec<u32>,
}

impl<'a> FakeHost<'a> {
    fn new(programs: &'a Programs, requests: impl IntoIterator<Item = bool>) -> Self {
        let requests = requests.into_iter().collect();
        let name = "train".to_owned();
        Self {
            programs,
            requests,
            answers: Vec::new(),
            name,
            keeping: Vec::new(),
            late: Vec::new(),
        }
    }
}

impl Host for FakeHost<'_> {
    fn next_request(&mut self) -> io::Result<bool> {
        self.requests.pop_front().ok_or(ErrorKind::UnexpectedEof.into())
    }

    fn answer(&mut self, state: CheckpointState, reason: &str) -> io::Result<()> {
        if state == CheckpointState::Done {
            self.programs.start(self.late.pop());
            if !self.users()?.is_empty() {
                return Err(ErrorKind::ResourceBusy.into());
            }
        }
        self.answers.push((state, reason.to_owned()));
        Ok(())
    }

    fn users(&self) -> io::Result<Vec<Process>> {
        let states = self.programs.states.borrow();
        let users = states
            .iter()
            .filter(|(pid, state)| **state != State::Checkpointed || self.keeping.contains(pid));
        Ok(users.map(|(pid, _)| Process { pid: *pid, name: self.name.clone() }).collect())
    }
}

/// Lets an agent carry out all requests of a host.
fn serve(host: &mut FakeHost<'_>, record: &std::path::Path) {
    let programs = host.programs;
    let requests = host.requests.len();
    let mut agent = Agent::with_record(host, programs, record.to_owned());
    (0..requests).for_each(|_| agent.serve().unwrap());
}

#[test]
fn programs_are_checkpointed_and_restored() {
    let folder = tempfile::tempdir().unwrap();
    let record = folder.path().join("record");
    let programs = Programs::default();
    programs.start([7, 8, 9]);
    let mut host = FakeHost::new(&programs, [false, true]);
    host.late = vec![10, 11];
    serve(&mut host, &record);
    let states: Vec<_> = host.answers.iter().map(|(state, _)| *state).collect();
    assert_eq!(states, [CheckpointState::Ready, CheckpointState::Done]);
    assert!(programs.all_are(State::Checkpointed), "{programs:?}");
    assert_eq!(programs.states.borrow().len(), 5, "programs that began late are among them");

    // Another agent restores them.
    let mut host = FakeHost::new(&programs, [false]);
    serve(&mut host, &record);
    assert!(programs.all_are(State::Running) && !record.exists(), "{programs:?}");
    assert_eq!(host.answers, [(CheckpointState::Ready, String::new())]);
}

#[test]
fn a_name_forges_no_line_of_the_record() {
    const NAME: &[u8] = b"a\n9 b\x1b\xe2\x80\xae";
    let named = std::thread::spawn(|| {
        std::fs::write("/proc/thread-self/comm", NAME).unwrap();
        let thread = nix::unistd::gettid().as_raw().cast_unsigned();
        Process::named(thread).unwrap()
    });
    let named = named.join().unwrap();
    assert_eq!(named.name, "a\\n9 b\\u{1b}\\u{202e}");

    let folder = tempfile::tempdir().unwrap();
    let record = folder.path().join("record");
    let programs = Programs::default();
    programs.start([7]);
    let mut host = FakeHost::new(&programs, [true]);
    host.name = "train\n9\n9 x".to_owned();
    serve(&mut host, &record);
    assert_eq!(std::fs::read_to_string(&record).unwrap(), "7\n");
    // Steps for process 9, which nothing has checkpointed, would panic.
    programs.start([9]);
    std::fs::write(&record, "7\n9 x\n 9\n+9\n09\n-9\n\n9\x1b\n").unwrap();
    let mut host = FakeHost::new(&programs, [false]);
    serve(&mut host, &record);
    assert!(programs.all_are(State::Running), "{programs:?}");
}

#[test]
fn a_process_that_changes_its_name_is_known_again() {
    let folder = tempfile::tempdir().unwrap();
    let record = folder.path().join("record");
    let programs = Programs::default();
    programs.start([7]);
    serve(&mut FakeHost::new(&programs, [true]), &record);
    let mut host = FakeHost::new(&programs, [true]);
    host.name = "other".to_owned();
    host.keeping = vec![7];
    serve(&mut host, &record);
    assert_eq!(host.answers[0].1, "process 7 (\"other\") keeps the vGPU's files open");
}

#[test]
fn one_that_refuses_leaves_all_running_and_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let record = folder.path().join("record");
    for step in [Step::Lock, Step::Checkpoint] {
        for refusing in [7, 8, 9] {
            let programs = Programs::default();
            programs.start([7, 8, 9]);
            *programs.refuses.borrow_mut() = Some((refusing, step));
            let mut host = FakeHost::new(&programs, [true]);
            serve(&mut host, &record);
            assert!(programs.all_are(State::Running), "{programs:?}");
            let reason =
                format!("process {refusing} (\"train\"): {step} failed: operation not supported");
            assert_eq!(host.answers, [(CheckpointState::Refused, reason)]);
        }
    }
    // One that begins when the others are checkpointed.
    let programs = Programs::default();
    programs.start([7, 8]);
    *programs.refuses.borrow_mut() = Some((9, Step::Lock));
    let mut host = FakeHost::new(&programs, [true]);
    host.late = vec![9];
    serve(&mut host, &record);
    assert!(programs.all_are(State::Running) && !record.exists(), "{programs:?}");
    assert_eq!(host.answers[0].0, CheckpointState::Refused);
}

#[test]
fn processes_with_a_device_open_are_found() {
    let _null = std::fs::File::open("/dev/null").unwrap();
    let own = std::process::id();
    let is_found = |majors: &[u64]| find(majors).unwrap().iter().any(|found| found.pid == own);
    assert!(is_found(&[195, 1]), "/dev/null has the major number 1");
    assert!(!is_found(&[195]));
}

#[test]
fn the_tool_gets_its_options_and_its_last_line_is_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tool");
    let script =
        "#!/bin/sh\n[ \"$2\" != lock ] && exit 0\necho first >&2; echo \"$*\" >&2; exit 1\n";
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    let tool = Tool(path);
    assert_eq!(tool.step(Step::Restore, 7), Ok(()));
    let reason = "--action lock --pid 7 --timeout 10000".to_owned();
    assert_eq!(tool.step(Step::Lock, 7), Err(reason));
    let missing = Tool(folder.path().join("missing")).step(Step::Lock, 7).unwrap_err();
    assert!(missing.contains("missing: No such file"), "{missing}");
}
