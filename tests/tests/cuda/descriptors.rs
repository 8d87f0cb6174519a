//! A program that takes all descriptors that it gets: the manager and other programs are served.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use cuda_socket::{
    Block, FileId, IoctlRequest, MapRequest, Refused, Reply, Request, encode_numbered,
};
use nix::errno::Errno;
use system_tests::worker_deaths::{replace, worker};
use system_tests::{Vgpud, wait_for};
use vendor_backends::nvidia::frontend::testing::{memory_params, word, words};

use crate::program::{Program, start_vgpu};

/// Variable with the socket of a vGPU, for a process of its own.
const SOCKET: &str = "TESSERA_TEST_SOCKET";

/// Files that a context has, at most.
const CONTEXT_FILES: usize = 40;
/// Memory objects of a page, in a program with much more than a framework has.
const OBJECTS: u32 = 5000;

/// Descriptors of a worker, and what it keeps for itself.
const LIMIT: usize = 8192;
const RESERVED: usize = 2048;

/// Descriptor by which the program knows its file.
const FD: i32 = 7;
/// Address of parameters in the program.
const PARAMS: u64 = 0x7000_0000;
const NO_MEMORY: u32 = 0x51;

impl Program {
    /// Allocates an object. Returns the argument.
    fn alloc(&mut self, file: FileId, object: [u32; 4], params: Vec<u8>) -> Result<Vec<u8>> {
        let mut argument = words(&object);
        argument.extend(PARAMS.to_le_bytes());
        argument.resize(48, 0);
        self.ioctl(file, 0xc030_462b, argument, params)
    }

    fn ioctl(
        &mut self,
        file: FileId,
        request: u32,
        argument: Vec<u8>,
        params: Vec<u8>,
    ) -> Result<Vec<u8>> {
        let request = Request::Ioctl(IoctlRequest {
            file,
            request,
            argument,
            blocks: vec![Block { address: PARAMS, bytes: params }],
            files: vec![(FD, file)],
            shared: Vec::new(),
            refused: Refused::default(),
        });
        match self.call(&request)? {
            Reply::Done(done) if done.errno == 0 => Ok(done.argument),
            other => bail!("{other:?}"),
        }
    }

    /// Creates a client with a device. Returns the client's handle.
    fn client(&mut self, file: FileId) -> Result<u32> {
        let root = word(&self.alloc(file, [0; 4], Vec::new())?, 2);
        let device = self.alloc(file, [root, root, 0x10, 0x80], vec![0; 56])?;
        ensure!(word(&device, 10) == 0, "no device");
        Ok(root)
    }

    /// Allocates system memory. Returns the status.
    fn memory(&mut self, file: FileId, root: u32, handle: u32, len: u64) -> Result<u32> {
        let params = memory_params(len, 4096);
        Ok(word(&self.alloc(file, [root, 0x10, handle, 0x3e], params)?, 10))
    }
}

/// Does what a program does first.
fn begin(path: &Path) -> Result<(Program, FileId, u32)> {
    let mut program = Program::connect(path)?;
    let file = program.open()?.map_err(Errno::from_raw)?;
    let root = program.client(file)?;
    Ok((program, file, root))
}

/// A program in a process of its own: it has what a context needs.
#[test]
#[ignore = "a process of the test below"]
fn another_program() -> Result<()> {
    let Some(path) = std::env::var_os(SOCKET).map(PathBuf::from) else { return Ok(()) };
    let (mut program, file, root) = begin(&path)?;
    for number in 1..CONTEXT_FILES {
        program.open()?.map_err(Errno::from_raw).with_context(|| format!("file {number}"))?;
    }
    for index in 0..100 {
        let status = program.memory(file, root, 0x1000 + index, 4096)?;
        ensure!(status == 0, "memory {index}: {status:#x}");
    }
    Ok(())
}

/// Runs a program in a process of its own.
fn run_another(socket: &Path) -> Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--exact", "descriptors::another_program", "--ignored"]);
    let output = command.env(SOCKET, socket).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    Ok(())
}

#[test]
fn a_program_that_takes_all_that_it_gets_stops_no_other() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let (uuid, socket) = start_vgpu(&vgpud)?;
    let (mut program, file, root) = begin(&socket)?;
    for index in 0..OBJECTS {
        let status = program.memory(file, root, 0x10_0000 + index, 4096)?;
        ensure!(status == 0, "memory {index}: {status:#x}");
    }
    let refused = loop {
        if let Err(errno) = program.open()? {
            break errno;
        }
    };
    ensure!(refused == Errno::EMFILE as i32, "errno {refused}");
    // More than there is.
    ensure!(program.memory(file, root, 0x1000, 1 << 50)? == NO_MEMORY, "a refusal of another kind");

    let used = |pid: u32| Ok::<_, anyhow::Error>(fs::read_dir(format!("/proc/{pid}/fd"))?.count());
    let held = used(worker(&vgpud, &uuid)?)?;
    ensure!(held < LIMIT - RESERVED, "{held} descriptors");
    let other = || run_another(&socket);
    other().context("beside a program that takes all that it gets")?;
    let stats = vgpud.get("/v1/stats")?;
    ensure!(!stats["vgpus"][0]["programs"].is_null(), "the manager has no answer: {stats}");

    // The next worker gets all of that from the anchor.
    replace(&vgpud, &uuid)?;
    ensure!(program.memory(file, root, 0x1001, 4096)? == 0, "no memory of the next worker");
    other().context("beside it, on the next worker")?;
    drop(program);
    wait_for("the descriptors are given back", || {
        worker(&vgpud, &uuid).and_then(used).is_ok_and(|used| used < 100)
    })
}

/// The kernel limits the descriptors that a worker's user has sent and that are not received.
#[test]
fn a_program_that_receives_no_descriptors_stops_no_other() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let (uuid, socket) = start_vgpu(&vgpud)?;
    let (mut program, file, root) = begin(&socket)?;
    ensure!(program.memory(file, root, 0x20, 4096)? == 0, "no memory");
    let mut argument = words(&[root, 0x10, 0x20, 0, 0, 0]);
    argument.extend(4096_u64.to_le_bytes());
    argument.extend(words(&[0, 0, 0xffff, 0, FD.cast_unsigned(), 0]));
    let mapped = program.ioctl(file, 0xc038_464e, argument, Vec::new())?;
    ensure!(word(&mapped, 10) == 0, "no mapping");
    let map = Request::Map(MapRequest { file, len: 4096, offset: 0, writable: true });
    let Reply::Mapped { .. } = program.call(&map)? else { bail!("no mapping") };
    let packet = encode_numbered(1, &map)?;
    // Requests that fill the socket, on one connection after the other, without receiving replies.
    let mut flooding = Vec::new();
    for _ in 0..100 {
        let Ok(connection) = Program::connect(&socket) else { break };
        for _ in 0..600 {
            if connection.socket.try_send(&packet, &[]).is_err() {
                break;
            }
        }
        flooding.push(connection);
    }
    ensure!(flooding.len() < 40, "{} connections of one process", flooding.len());
    run_another(&socket).context("beside a program that receives no descriptors")?;
    let Reply::Mapped { .. } = program.call(&map)? else { bail!("no mapping any more") };
    replace(&vgpud, &uuid)?;
    let Reply::Mapped { .. } = program.call(&map)? else { bail!("the next worker has not all") };
    drop(flooding);
    wait_for("the process may connect again", || Program::connect(&socket).is_ok())
}
