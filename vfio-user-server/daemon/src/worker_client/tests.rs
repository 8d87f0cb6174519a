//! Replies of workers, also of compromised ones.

use ipc::seqpacket::SeqPacketListener;

use super::*;
use crate::worker_protocol::ProgramsStatus;
use crate::worker_protocol::tests::status_of_version_1;

/// Returns the result of `request` to a worker that sends `reply` to any request.
pub fn answered<T>(
    reply: &WorkerReply,
    fds: &[BorrowedFd<'_>],
    request: impl FnOnce(&Path) -> T,
) -> T {
    answered_raw(&serde_json::to_vec(reply).unwrap(), fds, request)
}

/// Like [`answered`], with a reply of any bytes.
fn answered_raw<T>(reply: &[u8], fds: &[BorrowedFd<'_>], request: impl FnOnce(&Path) -> T) -> T {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("control.sock");
    let listener = SeqPacketListener::bind(&path).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let socket = listener.accept().unwrap();
            socket.recv(&mut vec![0; MAX_PACKET]).unwrap();
            socket.send(reply, fds).unwrap();
        });
        request(&path)
    })
}

#[test]
fn many_workers_that_do_not_answer_cost_one_wait() {
    let folder = tempfile::tempdir().unwrap();
    let listen = |number: usize| {
        let path = folder.path().join(number.to_string());
        (SeqPacketListener::bind(&path).unwrap(), path)
    };
    let (_listeners, paths): (Vec<_>, Vec<_>) = (0..20).map(listen).unzip();
    let begun = std::time::Instant::now();
    let statuses = statuses(&paths);
    assert!(begun.elapsed() < TIMEOUT * 5, "{:?}", begun.elapsed());
    assert_eq!(statuses.len(), paths.len());
    assert!(statuses.iter().all(Result::is_err), "{statuses:?}");
}

#[test]
fn worker_of_unsupported_version_is_recognized() {
    let version = VERSION + 1;
    let newer = WorkerStatus { version, oldest: version, ..status_of_version_1() };
    let newer = WorkerReply::Status(Box::new(newer));
    let error = answered(&newer, &[], status).unwrap_err().to_string();
    assert!(error.starts_with("The worker speaks version "), "{error}");
    for (result, why) in [
        (
            answered_raw(b"", &[], status),
            "does not speak a supported version of the control protocol",
        ),
        (answered_raw(b"{}", &[], status), "sends a reply that cannot be parsed"),
    ] {
        let error = result.unwrap_err().to_string();
        assert!(error.starts_with(&format!("The worker {why}; this vgpud speaks ")), "{error}");
    }
    let error = answered_raw(b"{\"reply\":\"\x1b[2J\"}", &[], status).unwrap_err().to_string();
    assert!(!error.contains('\u{1b}'), "{error}");
    let mut hostile = status_of_version_1();
    hostile.warnings = vec![format!("\u{1b}[2J\nINJECTED{}", "A".repeat(30_000))];
    hostile.warnings.resize(40, String::new());
    let processes = (0..1000).map(|pid| (pid, u64::MAX)).collect();
    let vram_used_bytes = u64::MAX;
    let programs = ProgramsStatus { vram_used_bytes, processes, ..ProgramsStatus::default() };
    hostile.programs = Some(programs);
    let hostile = WorkerReply::Status(Box::new(hostile));
    let WorkerStatus { warnings, programs, .. } = answered(&hostile, &[], status).unwrap();
    assert_eq!(programs.unwrap().processes.len(), MAX_PROCESSES);
    assert!(warnings.len() == MAX_WARNINGS && warnings[0].chars().count() <= MAX_TEXT + 20);
    assert!(warnings[0].starts_with("\\u{1b}[2J\\nINJECTED"), "{}", warnings[0]);
    for result in [
        answered(&WorkerReply::Done, &[], |path| status(path).map(drop)),
        answered(&WorkerReply::Done, &[], |path| {
            scanout(path).and_then(|(scanout, _)| scanout.map(drop))
        }),
        answered(&WorkerReply::Scanout(Scanout::default()), &[], stop),
    ] {
        let error = result.unwrap_err().to_string();
        assert!(error.starts_with("Unexpected reply of the worker"), "{error}");
    }
}
