//! Programs with the library, against a worker in the test's process.
//!
//! A test starts this program once more, with the library and one test of [`inside`].
//!
//! * [`fake_worker`]: the worker, with ioctls of its own
//! * [`inside`]: what the programs do

#![allow(clippy::unwrap_used)]

mod fake_worker;
mod inside;

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use self::fake_worker::FakeWorker;

/// Returns the library, which cargo builds beside its tests.
fn library() -> PathBuf {
    let library = std::env::current_exe().unwrap().with_file_name("libtessera_cuda.so");
    assert!(library.exists(), "{} is not built", library.display());
    library
}

/// Returns a command that runs with the library.
fn with_library(program: &str, worker: Option<&FakeWorker>) -> Command {
    let mut command = Command::new(program);
    command.env("LD_PRELOAD", library()).env_remove("TESSERA_CUDA_SOCKET");
    if let Some(worker) = worker {
        command.env("TESSERA_CUDA_SOCKET", worker.socket());
    }
    command
}

/// Returns a command that runs a test of [`inside`].
fn inside(name: &str, worker: &FakeWorker) -> Command {
    let exe = std::env::current_exe().unwrap();
    let mut command = with_library(exe.to_str().unwrap(), Some(worker));
    command.args(["--exact", &format!("inside::{name}"), "--ignored", "--nocapture"]);
    command.env(inside::MARK, "1");
    command
}

/// Runs a test of [`inside`] that must pass.
fn passes(name: &str, worker: &FakeWorker) {
    let output = inside(name, worker).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}\n{errors}");
}

/// Waits until the program's files are closed.
fn wait_for_no_files(worker: &FakeWorker) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while worker.open_files() > 0 {
        assert!(Instant::now() < deadline, "{} files stay open", worker.open_files());
        std::thread::sleep(Duration::from_millis(2));
    }
}

macro_rules! cases {
    ($($part:ident: $($name:ident)*;)*) => {$($(
        #[test]
        fn $name() {
            let worker = FakeWorker::start();
            passes(concat!(stringify!($part), "::", stringify!($name)), &worker);
            wait_for_no_files(&worker);
        }
    )*)*};
}

cases! {
    files:
        files_of_the_driver_look_as_they_do_on_a_host
        files_in_proc_are_the_workers
        descriptors_in_arguments_are_named
        copies_of_descriptors_are_the_same_file
        errors_are_errno
        packets_are_events;
    memory:
        arguments_and_blocks_reach_the_worker_and_come_back
        memory_is_fetched_and_written
        memory_is_placed_and_mapped
        private_memory_becomes_shared_in_place
        memory_that_cannot_be_shared_is_refused
        a_child_does_not_write_to_shared_memory_of_its_parent;
    processes:
        threads_take_turns
        a_child_has_a_connection_of_its_own
        a_vfork_child_leaves_its_parents_files
        a_descriptor_from_another_process_is_identified
        threads_are_cancelled_where_libc_cancels_them
        a_lost_connection_is_made_again
        closing_all_descriptors_does_no_harm;
}

#[test]
fn a_killed_program_closes_its_files() {
    let worker = FakeWorker::start();
    let mut child = inside("processes::waits_with_open_files", &worker).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    while worker.open_files() < 3 {
        assert!(Instant::now() < deadline, "no files");
        std::thread::sleep(Duration::from_millis(2));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    wait_for_no_files(&worker);
}

#[test]
fn replies_that_come_twice_count_once() {
    for name in ["files::copies_of_descriptors_are_the_same_file", "processes::threads_take_turns"]
    {
        let worker = FakeWorker::start();
        worker.repeat_replies();
        passes(name, &worker);
        // Descriptors of the second reply are closed as well.
        wait_for_no_files(&worker);
    }
}

#[test]
fn a_connection_that_ends_before_a_reply_is_made_again() {
    let worker = FakeWorker::start();
    worker.lose_connections(3);
    passes("files::packets_are_events", &worker);
    assert_eq!(worker.connections.load(Ordering::SeqCst), 4);
}

#[test]
fn a_program_that_is_refused_is_told_why() {
    let worker = FakeWorker::start();
    worker.refuse(libc::EBUSY);
    let output = with_library("/bin/cat", Some(&worker)).arg("/dev/nvidiactl").output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("the vGPU serves a VM; use another vGPU"), "{text}");
    assert_eq!(worker.connections.load(Ordering::SeqCst), 1, "it tries once");
}

#[test]
fn other_programs_do_not_connect() {
    let worker = FakeWorker::start();
    for (program, args) in [
        ("/bin/ls", &["-l", "/etc", "/proc/self"][..]),
        ("/bin/sh", &["-c", "echo a | cat; : > /dev/null; (exit 3) || test -e /etc/passwd"]),
    ] {
        let plain = Command::new(program).args(args).output().unwrap();
        for worker in [None, Some(&worker)] {
            let output = with_library(program, worker).args(args).output().unwrap();
            assert_eq!((output.status, &output.stderr), (plain.status, &plain.stderr), "{program}");
        }
    }
    assert_eq!(worker.connections.load(Ordering::SeqCst), 0);
}

#[test]
fn a_program_without_a_vgpu_has_the_hosts_files() {
    let script = "test -e /dev/nvidiactl; echo $?; cat /proc/devices";
    let plain = Command::new("/bin/sh").args(["-c", script]).output().unwrap();
    let output = with_library("/bin/sh", None).args(["-c", script]).output().unwrap();
    assert_eq!((output.stdout, output.stderr), (plain.stdout, plain.stderr));
}

#[test]
fn an_absent_worker_is_reported_once() {
    let dir = tempfile::tempdir().unwrap();
    let script = "cat /dev/nvidiactl /proc/driver/nvidia/params";
    let mut command = with_library("/bin/sh", None);
    command.env("TESSERA_CUDA_SOCKET", dir.path().join("cuda.sock"));
    let output = command.args(["-c", &format!("exec {script}")]).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    let reports = text.lines().filter(|line| line.starts_with("tessera-cuda: ")).count();
    assert!(!output.status.success() && reports == 1, "{text}");
    assert!(text.contains("No such file or directory; start the vGPU"), "{text}");
    assert!(text.contains("No such device"), "{text}");
}
