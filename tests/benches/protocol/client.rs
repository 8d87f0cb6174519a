//! A client that sleeps while it waits, like a virtual CPU.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

const REQUEST: usize = 32;
/// Bytes of the reply to a 4-byte read.
pub const REPLY: usize = 36;

fn header(command: u16, size: usize) -> Vec<u8> {
    let mut bytes = [1_u16.to_ne_bytes(), command.to_ne_bytes()].concat();
    bytes.extend([size as u32, 0, 0].map(u32::to_ne_bytes).concat());
    bytes
}

/// A connection.
pub struct Client {
    stream: UnixStream,
    request: Vec<u8>,
    /// Whether the peer is a server; otherwise an echo.
    serves: bool,
}

impl Client {
    /// Connects. All peers except the plain socket get a version first.
    pub fn connect(path: &Path, greet: bool) -> Self {
        let mut request = header(9, REQUEST);
        request.extend(0x10_u64.to_ne_bytes());
        request.extend([0_u32, 4].map(u32::to_ne_bytes).concat());
        let mut client =
            Self { stream: UnixStream::connect(path).unwrap(), request, serves: greet };
        if greet {
            client.greet();
        }
        client
    }

    fn greet(&mut self) {
        let caps = b"{\"capabilities\":{\"max_msg_fds\":16,\"max_data_xfer_size\":1048576,\
            \"migration\":{\"pgsize\":4096}}}\0";
        let mut message = header(1, 20 + caps.len());
        message.extend([0; 4]);
        message.extend(caps);
        self.stream.write_all(&message).unwrap();
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply).unwrap();
        let size = u32::from_ne_bytes([reply[4], reply[5], reply[6], reply[7]]) as usize;
        self.stream.read_exact(&mut vec![0; size - 16]).unwrap();
    }

    /// Measures one trapped read of 4 bytes.
    pub fn read(&mut self) -> Duration {
        let mut reply = [0; REPLY];
        let start = Instant::now();
        self.stream.write_all(&self.request).unwrap();
        self.stream.read_exact(&mut reply).unwrap();
        let took = start.elapsed();
        assert!(!self.serves || reply[32..] == [0x5a; 4], "the wrong answer");
        took
    }
}

/// Sorted times.
#[derive(Default)]
pub struct Times(Vec<Duration>);

impl Times {
    pub fn add(&mut self, more: impl IntoIterator<Item = Duration>) {
        self.0.extend(more);
        self.0.sort_unstable();
    }

    /// Returns a percentile in microseconds.
    pub fn percentile(&self, hundredths: usize) -> f64 {
        let at = (self.0.len() - 1) * hundredths / 100;
        self.0[at].as_secs_f64() * 1e6
    }
}
