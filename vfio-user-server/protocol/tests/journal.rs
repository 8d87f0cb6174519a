//! Sessions whose process dies at each step: another one continues, and each message has its effect
//! once.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::io;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use nix::sys::socket::{MsgFlags, recv};
use vfio_user_server::device::{Device, Region};
use vfio_user_server::errno::Errno;
use vfio_user_server::journal::{FirstMessage, Journal, ReplyPhase, SessionRecord};
use vfio_user_server::session::Session;

/// Messages of one client.
const ACCESSES: u32 = 40;
/// Steps of one message: two for each call of the journal, and one for its effect.
const STEPS: u32 = 7;
/// Commands of the protocol.
const VERSION: u16 = 1;
const REGION_READ: u16 = 9;
const REGION_WRITE: u16 = 10;

/// What survives a process.
#[derive(Clone, Debug, Default)]
struct Stored {
    count: u32,
    record: SessionRecord,
    reply: ReplyPhase,
    finished: u64,
    /// Bytes of finished messages in the socket.
    in_socket: usize,
}

impl Stored {
    fn remove(&mut self, socket: BorrowedFd<'_>) {
        if self.in_socket == 0 {
            return;
        }
        let mut messages = vec![0; self.in_socket];
        let removed = recv(socket.as_raw_fd(), &mut messages, MsgFlags::MSG_DONTWAIT);
        assert_eq!(removed, Ok(self.in_socket));
        self.in_socket = 0;
    }
}

/// Device that counts the writes to its register. It dies at the step `dies_at`.
#[derive(Debug)]
struct Counter {
    count: u32,
    stored: Arc<Mutex<Stored>>,
    steps: u32,
    dies_at: u32,
}

impl Counter {
    fn step(&mut self) {
        self.steps += 1;
        assert_ne!(self.steps, self.dies_at, "the process dies");
    }

    fn store(&mut self, change: impl FnOnce(&mut Stored, u32)) {
        self.step();
        change(&mut self.stored.lock().unwrap(), self.count);
        self.step();
    }
}

impl Device for Counter {
    fn region(&self, index: u32) -> Option<Region<'_>> {
        (index == 0).then(|| Region::trapped(4))
    }

    fn region_read(&mut self, _: u32, _: u64, data: &mut [u8]) -> Result<(), Errno> {
        data.copy_from_slice(&self.count.to_ne_bytes());
        Ok(())
    }

    fn region_write(&mut self, _: u32, _: u64, _: &[u8]) -> Result<(), Errno> {
        self.count += 1;
        self.step();
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Errno> {
        Ok(())
    }

    fn journal(&mut self) -> Option<&mut dyn Journal> {
        Some(self)
    }
}

impl Journal for Counter {
    fn commit(&mut self, record: SessionRecord, _is_repeatable: bool) {
        self.store(|stored, count| (stored.count, stored.record) = (count, record));
    }

    fn begin_reply(&mut self) {
        self.store(|stored, _| stored.reply = ReplyPhase::Sending);
    }

    fn finish(&mut self, bytes: usize) {
        self.store(|stored, _| {
            stored.finished += 1;
            stored.in_socket += bytes;
            stored.reply = ReplyPhase::None;
        });
    }

    fn remove(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.store(|stored, _| stored.remove(socket));
        Ok(())
    }

    fn set_adoptable(&mut self, adoptable: bool) {
        assert!(adoptable, "all messages are there as a whole");
    }
}

/// Client that makes one access at a time, drops replies without data for which it does not wait,
/// and answers questions in between.
struct Client {
    socket: UnixStream,
    id: u16,
}

impl Client {
    fn access(&mut self, command: u16, payload: &[u8]) -> Vec<u8> {
        self.id += 1;
        let mut message = self.id.to_ne_bytes().to_vec();
        message.extend(command.to_ne_bytes());
        message.extend((16 + payload.len() as u32).to_ne_bytes());
        message.extend([0; 8]);
        message.extend(payload);
        self.socket.write_all(&message).unwrap();
        let mut questions = Vec::new();
        loop {
            let (header, data) = self.receive();
            let id = u16::from_ne_bytes([header[0], header[1]]);
            match header[8] & 0xf {
                0 => questions.push(header),
                _ if id != self.id => assert!(data.is_empty(), "a second reply with data"),
                _ => {
                    for mut question in questions {
                        // A reply with ENOSYS.
                        (question[8], question[12]) = (0x21, libc::ENOSYS as u8);
                        self.socket.write_all(&question).unwrap();
                    }
                    return data;
                }
            }
        }
    }

    fn receive(&mut self) -> ([u8; 16], Vec<u8>) {
        let mut header = [0; 16];
        self.socket.read_exact(&mut header).unwrap();
        let size = u32::from_ne_bytes(header[4..8].try_into().unwrap());
        let mut data = vec![0; size as usize - 16];
        self.socket.read_exact(&mut data).unwrap();
        (header, data)
    }
}

fn access(data: &[u8]) -> Vec<u8> {
    let mut payload = [0_u64.to_ne_bytes(), [0, 0, 0, 0, 4, 0, 0, 0]].concat();
    payload.extend(data);
    payload
}

/// Writes to the register and reads it. Each write must count once.
fn drive(socket: UnixStream) {
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut client = Client { socket, id: 0 };
    let capabilities = b"{\"capabilities\":{\"write_multiple\":true}}\0";
    client.access(VERSION, &[&[0; 4][..], capabilities].concat());
    for number in 1..=ACCESSES {
        client.access(REGION_WRITE, &access(&[0; 4]));
        let data = client.access(REGION_READ, &access(&[]));
        assert_eq!(u32::from_ne_bytes(data[16..20].try_into().unwrap()), number);
    }
}

/// Serves a client until it leaves, by one process after the other that dies at the step `dies_at`
/// of its life. Returns the number of deaths.
fn serve(socket: &UnixStream, stored: &Arc<Mutex<Stored>>, dies_at: u32) -> u32 {
    let mut session = Session::new(socket.try_clone().unwrap().into()).unwrap();
    for deaths in 0.. {
        let count = stored.lock().unwrap().count;
        // Processes that die within each message make no progress.
        let dies_at = if deaths > 0 && dies_at <= STEPS { 0 } else { dies_at };
        let mut device = Counter { count, stored: Arc::clone(stored), steps: 0, dies_at };
        if catch_unwind(AssertUnwindSafe(|| session.serve(&mut device))).is_ok() {
            return deaths;
        }
        stored.lock().unwrap().remove(socket.as_fd());
        let Stored { record, reply, finished, .. } = stored.lock().unwrap().clone();
        let executed = (record.message == finished + 1).then(|| record.result());
        let first = FirstMessage { executed, reply };
        let socket = socket.try_clone().unwrap().into();
        session = Session::adopt(socket, record, finished, first, []).unwrap();
    }
    unreachable!("the loop has no end")
}

#[test]
fn each_message_has_its_effect_once_wherever_the_process_dies() {
    for dies_at in (1..5 * STEPS).chain(31 * STEPS..34 * STEPS) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let client = thread::spawn(move || drive(theirs));
        let stored = Arc::new(Mutex::new(Stored::default()));
        let deaths = serve(&ours, &stored, dies_at);
        client.join().unwrap();
        assert!(deaths > 0, "no process died at step {dies_at}");
        assert_eq!(stored.lock().unwrap().count, ACCESSES);
    }
}
