//! A vGPU in vfio-user's migration messages, with a client that speaks them.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use anyhow::Result;
use mdev_core::abi::control::reg;
use mdev_core::abi::mailbox::{Header, MapVram, Opcode, PAYLOAD, Status, Unmap, VA_START};
use mdev_core::stream::{StreamReader, StreamWriter};
use mdev_core::testing::memory;
use serde_json::json;
use system_tests::raw_client::{DMA_MAP, FEATURE, MIG_DATA_READ, MIG_DATA_WRITE, RESET, RawClient};
use system_tests::vgpuctl::{refused, vgpuctl};
use system_tests::{Vgpud, bytes};
use zerocopy::IntoBytes;

/// BARs and configuration space.
pub const DISPLAY: u32 = 2;
const CONTROL: u32 = 3;
pub const VRAM: u32 = 4;
const CONFIG: u32 = 7;

/// `VFIO_DEVICE_STATE_*`.
const ERROR: u32 = 0;
const STOP: u32 = 1;
const RUNNING: u32 = 2;
const STOP_COPY: u32 = 3;
const RESUMING: u32 = 4;

/// Address of the mailbox page in guest memory, and length of guest memory.
const MAILBOX: u64 = 0x8000;
const RAM: u64 = 1 << 20;
/// Bytes that are read at once.
const PIECE: u32 = 1 << 20;

/// A VM's monitor and its guest.
pub struct Guest {
    pub client: RawClient,
    ram: File,
}

impl Guest {
    pub fn attach(vgpud: &Vgpud, uuid: &str) -> Self {
        let mut client = RawClient::attach(&vgpud.vfio_socket(uuid));
        let ram = memory(RAM);
        let fd: OwnedFd = ram.try_clone().unwrap().into();
        client.ok_with(DMA_MAP, &bytes![32_u32, 3_u32, 0_u64, 0_u64, RAM], &[&fd]);
        Self { client, ram }
    }

    pub fn request(&mut self, opcode: Opcode, payload: &[u8]) -> Status {
        let header = Header {
            opcode: opcode as u32,
            request_bytes: payload.len() as u32,
            ..Header::default()
        };
        self.ram.write_all_at(header.as_bytes(), MAILBOX).unwrap();
        self.ram.write_all_at(payload, MAILBOX + PAYLOAD as u64).unwrap();
        self.client.write(CONTROL, reg::MAILBOX_LO, &(MAILBOX as u32).to_le_bytes());
        self.client.write(CONTROL, reg::MAILBOX_DOORBELL, &1_u32.to_le_bytes());
        let status = self.client.read(CONTROL, reg::MAILBOX_STATUS, 4);
        Status::from_number(u32::from_le_bytes(status.try_into().unwrap()))
    }

    /// Returns the errno of a change of the migration state.
    fn set_state(&mut self, state: u32) -> u32 {
        self.client.request(FEATURE, &bytes![16_u32, 0x2_0002_u32, state, 0_u32], &[]).error
    }

    fn state(&mut self) -> u32 {
        self.client.ok(FEATURE, &bytes![16_u32, 0x1_0002_u32]).u32_at(8)
    }

    fn save(&mut self) -> Vec<u8> {
        assert_eq!(self.set_state(STOP_COPY), 0);
        let mut stream = Vec::new();
        loop {
            let reply = self.client.ok(MIG_DATA_READ, &bytes![8 + PIECE, PIECE]);
            stream.extend_from_slice(&reply.payload[8..]);
            if reply.u32_at(4) < PIECE {
                return stream;
            }
        }
    }

    /// Writes a stream in pieces. Returns the errno of leaving the state.
    fn restore(&mut self, stream: &[u8]) -> u32 {
        assert_eq!(self.set_state(RESUMING), 0);
        for piece in stream.chunks(70_001) {
            let head = bytes![8 + piece.len() as u32, piece.len() as u32];
            let reply = self.client.request(MIG_DATA_WRITE, &[&head, piece].concat(), &[]);
            if reply.error != 0 {
                break;
            }
        }
        self.set_state(STOP)
    }
}

pub fn start(vgpud: &Vgpud, mdev_type: &str) -> Result<String> {
    vgpud.create(&json!({ "mdev_type": mdev_type, "run": true }))
}

#[test]
fn a_vgpu_moves_by_migration_messages() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let mut source = Guest::attach(&vgpud, &start(&vgpud, "SOFT-256MQ")?);
    let map = MapVram { va: VA_START, offset: 0x3000, length: 0x2000, ..MapVram::default() };
    assert_eq!(source.request(Opcode::MapVram, map.as_bytes()), Status::Ok);
    source.client.write(CONFIG, 0x10, &0xe000_0000_u32.to_le_bytes());
    source.client.write(DISPLAY, 0x502, &640_u16.to_le_bytes());
    let picture: Vec<u8> = (0..3_000_000_u32).map(|n| (n / 7) as u8).collect();
    for (number, piece) in picture.chunks(1 << 19).enumerate() {
        source.client.write(VRAM, 0x10_0000 + ((number as u64) << 19), piece);
    }
    let stream = source.save();
    assert!(stream.starts_with(b"TSRVGPU\n") && stream.len() < 5_000_000, "{}", stream.len());
    // The source goes on where it was.
    assert_eq!(source.set_state(RUNNING), 0);
    assert_eq!(source.request(Opcode::GetInfo, &[]), Status::Ok);

    let mut target = Guest::attach(&vgpud, &start(&vgpud, "SOFT-256MQ")?);
    target.client.write(VRAM, 0, &[0xee; 64]);
    assert_eq!(target.restore(&stream), 0);
    assert_eq!(target.set_state(RUNNING), 0);
    assert_eq!(target.client.read(VRAM, 0, 64), [0; 64], "what was there is gone");
    let moved = target.client.read(VRAM, 0x10_0000 + 2_000_000, 4096);
    assert!(moved == picture[2_000_000..2_004_096]);
    assert_eq!(target.client.read(DISPLAY, 0x502, 2), 640_u16.to_le_bytes());
    assert_eq!(target.client.read(CONFIG, 0x10, 4), 0xe000_0008_u32.to_le_bytes());
    let unmap = Unmap { va: VA_START, length: 0x2000 };
    assert_eq!(target.request(Opcode::Unmap, unmap.as_bytes()), Status::Ok, "it was mapped");
    assert_eq!(target.request(Opcode::Unmap, unmap.as_bytes()), Status::NotFound);
    Ok(())
}

#[test]
fn damaged_shortened_and_foreign_streams_leave_a_vgpu_that_was_reset() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let mut source = Guest::attach(&vgpud, &start(&vgpud, "SOFT-256MQ")?);
    source.client.write(VRAM, 0x10_0000, &[0xab; 4096]);
    let stream = source.save();
    let mut target = Guest::attach(&vgpud, &start(&vgpud, "SOFT-256MQ")?);
    let mut damaged = stream.clone();
    let last = damaged.len() - 100;
    damaged[last] ^= 4;
    let foreign = b"QEVM\0\0\0\x03 is another format".to_vec();
    for bad in [&damaged[..], &stream[..stream.len() - 1], &stream[..40], &foreign, &[]] {
        target.client.write(DISPLAY, 0x502, &320_u16.to_le_bytes());
        assert_ne!(target.restore(bad), 0, "{} bytes", bad.len());
        assert_eq!(target.state(), ERROR);
        assert_ne!(target.set_state(RUNNING), 0, "only a reset helps");
        target.client.ok(RESET, &[]);
        assert_eq!(target.state(), RUNNING);
        assert_eq!(target.client.read(VRAM, 0x10_0000, 4096), [0; 4096]);
        assert_ne!(target.client.read(DISPLAY, 0x502, 2), 320_u16.to_le_bytes());
        assert_eq!(target.request(Opcode::GetInfo, &[]), Status::Ok, "it works");
    }
    let mut other = Guest::attach(&vgpud, &start(&vgpud, "SOFT-256MC")?);
    assert_ne!(other.restore(&stream), 0, "another type");
    Ok(())
}

/// Saved and restored through the manager, with the words of its refusals.
#[test]
fn the_manager_refuses_what_it_cannot_save_or_restore() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = start(&vgpud, "SOFT-256MQ")?;
    let mut guest = Guest::attach(&vgpud, &uuid);
    // More than what waits in buffers for a client that does not read.
    for mib in 0..32 {
        guest.client.write(VRAM, mib << 20, &vec![0x60 + mib as u8; 1 << 20]);
    }
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("file");
    let name = file.to_string_lossy().into_owned();
    // A save whose client stops reading goes on, and excludes another one.
    let mut slow = UnixStream::connect(vgpud.api_socket())?;
    write!(slow, "POST /v1/vgpus/{uuid}/save HTTP/1.1\r\nHost: t\r\nContent-Length: 0\r\n\r\n")?;
    let mut status = [0; 12];
    slow.read_exact(&mut status)?;
    assert_eq!(&status, b"HTTP/1.1 200");
    let words = "is being saved or restored already";
    refused(&vgpud, &format!("save {uuid} -o {name}"), 5, words)?;
    // A resume waits for a save that ends, as one that was given up does.
    let gives_up = thread::spawn(move || {
        thread::sleep(Duration::from_millis(300));
        drop(slow);
    });
    vgpuctl(&vgpud, &format!("resume {uuid}"))?;
    gives_up.join().unwrap();
    vgpuctl(&vgpud, &format!("save {uuid} -o {name}"))?;
    vgpuctl(&vgpud, &format!("restore {uuid} -i {name}"))?;
    assert!(vgpud.show(&uuid)?["warnings"].to_string().contains("It is paused since a save"));
    vgpuctl(&vgpud, &format!("resume {uuid}"))?;
    assert_eq!(guest.client.read(VRAM, (8 << 20) + 4096, 16), [0x68; 16]);

    let other = start(&vgpud, "SOFT-256MC")?;
    let _attached = Guest::attach(&vgpud, &other);
    let words = "The saved vGPU has type SOFT-256MQ, and vGPU";
    refused(&vgpud, &format!("restore {other} -i {name}"), 5, words)?;
    // A valid stream of a state that is none.
    let head = StreamReader::new(File::open(&file)?)?.1;
    let mut writer = StreamWriter::new(File::create(&file)?, &head)?;
    writer.state(b"{}")?;
    writer.finish()?;
    let words = "The vGPU cannot be restored: The saved vGPU cannot be read";
    refused(&vgpud, &format!("restore {uuid} -i {name}"), 5, words)
}

/// A file that vgpud reads itself, and a stream for an earlier one: the same vGPU, and the same
/// refusals.
#[test]
fn a_file_whose_memory_is_damaged_leaves_a_vgpu_that_was_reset() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = start(&vgpud, "SOFT-256MQ")?;
    let mut guest = Guest::attach(&vgpud, &uuid);
    for mib in 0..4 {
        guest.client.write(VRAM, mib << 20, &vec![0x60 + mib as u8; 1 << 20]);
    }
    let folder = tempfile::tempdir()?;
    let name = folder.path().join("file");
    let (restore, save) = (
        format!("restore {uuid} -i {}", name.display()),
        format!("save {uuid} -o {}", name.display()),
    );
    vgpuctl(&vgpud, &save)?;
    let file = File::options().read(true).write(true).open(&name)?;
    let whole = file.metadata()?.len();
    let mut byte = [0];
    file.read_exact_at(&mut byte, whole - 1_500_000)?;
    file.write_all_at(&[byte[0] ^ 1], whole - 1_500_000)?;
    refused(&vgpud, &restore, 2, "a checksum is wrong")?;
    assert_eq!(guest.client.read(VRAM, 0, 4096), [0; 4096], "a part was restored");
    assert_eq!(guest.request(Opcode::GetInfo, &[]), Status::Ok, "it works");
    file.write_all_at(&byte, whole - 1_500_000)?;
    vgpuctl(&vgpud, &restore)?;
    vgpuctl(&vgpud, &format!("resume {uuid}"))?;
    assert_eq!(guest.client.read(VRAM, 3 << 20, 4096), [0x63; 4096]);
    // What is found before anything is changed.
    guest.client.write(VRAM, 0, &[7; 16]);
    file.set_len(whole - 1)?;
    refused(&vgpud, &restore, 1, "it was cut off")?;
    assert_eq!(guest.client.read(VRAM, 0, 16), [7; 16]);
    let (status, body) = vgpud.request("POST", &format!("/v1/vgpus/{uuid}/restore-file"), None)?;
    let body = String::from_utf8_lossy(&body).into_owned();
    assert!(status == 400 && body.contains("No file came with the request"), "{status} {body}");
    Ok(())
}
