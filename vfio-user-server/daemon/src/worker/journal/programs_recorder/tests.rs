//! Records of programs, and what the anchor keeps with them.

use super::super::descriptors::{Descriptors, MAX_OF_PROGRAMS, Message};
use super::*;

/// Programs with connections alone.
#[derive(Default)]
struct Connections {
    all: BTreeMap<Source, bool>,
    changed: bool,
    answer: Option<Answer>,
}

impl ProgramState for Connections {
    fn last(&self) -> Source {
        self.all.keys().next_back().copied().unwrap_or(Source(0))
    }

    fn answer(&self) -> Option<&Answer> {
        self.answer.as_ref()
    }

    fn take_changes(&mut self) -> Option<ProgramChanges> {
        std::mem::take(&mut self.changed).then(|| self.all())
    }

    fn all(&self) -> ProgramChanges {
        let connections = self.all.iter().map(|(source, greeted)| (*source, Some(*greeted)));
        let connections = connections.collect();
        ProgramChanges { connections, files: Vec::new(), front_end: None, memory: Vec::new() }
    }

    fn memory_file(&self, _id: MemoryFileId) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Programs with one file of memory, which has changed.
struct Memory(std::fs::File);

impl ProgramState for Memory {
    fn last(&self) -> Source {
        Source(1)
    }

    fn answer(&self) -> Option<&Answer> {
        None
    }

    fn take_changes(&mut self) -> Option<ProgramChanges> {
        Some(self.all())
    }

    fn all(&self) -> ProgramChanges {
        let (connections, files) = (Vec::new(), Vec::new());
        ProgramChanges { connections, files, front_end: None, memory: vec![MemoryFileId(7)] }
    }

    fn memory_file(&self, id: MemoryFileId) -> Option<BorrowedFd<'_>> {
        (id == MemoryFileId(7)).then(|| self.0.as_fd())
    }
}

/// A program has registered memory of its own, and a worker has died between passing its file
/// on and the record.
#[test]
fn a_programs_file_stays_when_its_request_is_repeated() {
    let (mut recorder, anchor) = recorder();
    let open = |path: &str| std::fs::File::open(path).unwrap();
    let mut kept = Descriptors::default();
    let left = OwnedFd::from(open("/dev/null"));
    assert!(
        kept.apply(Message::Keep(Key::program_memory(7)), left.try_clone().ok().map(Into::into))
    );
    recorder.adopt(None, kept.keys());
    recorder.set_unfinished(BTreeMap::from([(7, left)]));
    assert!(recorder.record(&mut Memory(open("/dev/zero"))));
    recorder.recorded();
    recorder.end_attempts();
    keep_all(&anchor, &mut kept);
    assert!(kept.take(Key::program_memory(7)).is_some(), "a state needs it");
}

/// Returns a recorder with the anchor's end of its socket.
fn recorder() -> (ProgramsRecorder, SeqPacket) {
    let (anchor, worker) = SeqPacket::pair().unwrap();
    (ProgramsRecorder::new(Anchor::new(worker), None), anchor)
}

/// Does what an anchor does with the messages of its worker.
fn keep_all(anchor: &SeqPacket, kept: &mut Descriptors) {
    let mut buffer = [0; Message::BYTES];
    while let Ok(Some(packet)) = anchor.try_recv_with_fds(&mut buffer) {
        let message = Message::decode(&buffer[..packet.len]).unwrap();
        assert!(kept.apply(message, packet.fds.into_iter().next()));
    }
}

#[test]
fn a_record_is_read_as_it_was_written() {
    let (mut recorder, anchor) = recorder();
    let mut programs = Connections { changed: true, ..Default::default() };
    programs.all.insert(Source(3), false);
    assert_eq!(recorder.number(), 0);
    assert!(recorder.record(&mut programs) && !recorder.record(&mut programs));
    programs.all.insert(Source(9), true);
    let packet = vec![1, 2, 3];
    let answer = Answer { connection: Source(9), number: 4, packet, descriptors: 1 };
    (programs.changed, programs.answer) = (true, Some(answer.clone()));
    assert!(recorder.record(&mut programs) && !recorder.is_lost());
    let mut kept = Descriptors::default();
    keep_all(&anchor, &mut kept);
    let fd = kept.take(Key::PROGRAMS).unwrap();
    let mut file = ProgramRecords::open(fd.as_fd()).unwrap().unwrap();
    let read = JournaledPrograms::read(&mut file, recorder.number()).unwrap();
    assert_eq!((read.last, read.answer), (Source(9), Some(answer)));
    assert_eq!(read.connections, programs.all);
    assert!(JournaledPrograms::read(&mut file, recorder.number() + 1).is_err());
    assert!(recorder.end() && !recorder.end());
    assert_eq!(recorder.number(), 0);
}

#[test]
fn a_connection_that_has_arrived_stays_although_there_were_no_programs() {
    let (mut recorder, anchor) = recorder();
    let mut kept = Descriptors::default();
    let (socket, _other) = SeqPacket::pair().unwrap();
    recorder.keep(Key::connection(1), socket.as_fd());
    assert!(!recorder.end());
    recorder.recorded();
    keep_all(&anchor, &mut kept);
    assert_eq!(kept.keys().collect::<Vec<_>>(), [Key::connection(1)]);
    // Another one with the same number.
    recorder.drop_later(Key::connection(1));
    recorder.keep(Key::connection(1), socket.as_fd());
    recorder.recorded();
    keep_all(&anchor, &mut kept);
    assert_eq!(kept.keys().collect::<Vec<_>>(), [Key::connection(1)]);
}

#[test]
fn beyond_the_limit_of_descriptors_no_worker_continues() {
    let (mut recorder, anchor) = recorder();
    let receiving = std::thread::spawn(move || {
        let mut buffer = [0; Message::BYTES];
        while let Ok(Some(_)) = anchor.recv(&mut buffer) {}
    });
    let (socket, _other) = SeqPacket::pair().unwrap();
    recorder.record(&mut Connections::default());
    let number = |at: usize| Key::file(u32::try_from(at).unwrap());
    for at in 0..MAX_OF_PROGRAMS {
        recorder.keep(number(at), socket.as_fd());
    }
    assert!(!recorder.is_lost());
    recorder.keep(number(MAX_OF_PROGRAMS), socket.as_fd());
    assert!(recorder.is_lost());
    recorder.drop_later(number(MAX_OF_PROGRAMS));
    assert!(!recorder.is_lost());
    drop(recorder);
    receiving.join().unwrap();
}

#[test]
fn the_anchor_has_closed_a_reply_when_the_probe_ends() {
    let (mut recorder, anchor) = recorder();
    let (ours, theirs) = SeqPacket::pair().unwrap();
    recorder.keep_reply(&[theirs.into()]);
    recorder.drop_reply(true);
    let anchoring = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        let mut kept = Descriptors::default();
        keep_all(&anchor, &mut kept);
        kept.keys().count()
    });
    assert!(ours.try_recv(&mut [0]).is_err(), "the anchor has the other end");
    recorder.settle();
    assert!(ours.try_recv(&mut [0]).unwrap().is_none(), "no one has");
    assert_eq!(anchoring.join().unwrap(), 0);
}
