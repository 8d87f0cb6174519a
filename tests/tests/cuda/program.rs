//! A program's connection to the worker of a vGPU, without the preload library.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use cuda_socket::{
    FileId, Node, Reply, Request, VERSION, decode_numbered, encode, encode_numbered,
};
use foreign_fds::ForeignFd;
use ipc::seqpacket::{MAX_PACKET, SeqPacket};
use serde_json::json;
use system_tests::Vgpud;

use crate::TYPE;

/// Starts a vGPU. Returns its UUID and the socket of its programs.
pub fn start_vgpu(vgpud: &Vgpud) -> Result<(String, PathBuf)> {
    let uuid = vgpud.create(&json!({ "mdev_type": TYPE, "run": true }))?;
    let socket = vgpud.vfio_socket(&uuid).with_file_name("cuda.sock");
    Ok((uuid, socket))
}

/// A program's connection.
pub struct Program {
    pub socket: SeqPacket,
    last: u64,
    /// Ends of the sockets of its files.
    files: Vec<ForeignFd>,
}

impl Program {
    /// Connects, and is welcomed.
    pub fn connect(path: &Path) -> Result<Self> {
        let socket = SeqPacket::connect(path)?;
        socket.send(&encode(&Request::Hello { version: VERSION })?, &[])?;
        let mut buffer = vec![0; MAX_PACKET];
        let packet = socket.recv(&mut buffer)?.context("No welcome")?;
        // A refusal has no number.
        let reply = decode_numbered(&buffer[..packet.len]);
        ensure!(matches!(reply, Ok((0, Reply::Welcome(_)))), "{reply:?}");
        Ok(Self { socket, last: 0, files: Vec::new() })
    }

    /// Sends a request and returns the reply.
    pub fn call(&mut self, request: &Request) -> Result<Reply> {
        self.last += 1;
        self.socket.send(&encode_numbered(self.last, request)?, &[])?;
        let mut buffer = vec![0; MAX_PACKET];
        loop {
            let packet = self.socket.recv_with_fds(&mut buffer)?.context("No reply")?;
            let (number, reply) = decode_numbered(&buffer[..packet.len])?;
            // The next worker may repeat a reply.
            if number == self.last {
                self.files.extend(packet.fds);
                return Ok(reply);
            }
        }
    }

    /// Opens the control file. Returns its number, or the worker's `errno`.
    pub fn open(&mut self) -> Result<Result<FileId, i32>> {
        match self.call(&Request::Open(Node::Control))? {
            Reply::Opened(file) => Ok(Ok(file)),
            Reply::Failed { errno } => Ok(Err(errno)),
            other => bail!("{other:?}"),
        }
    }
}
