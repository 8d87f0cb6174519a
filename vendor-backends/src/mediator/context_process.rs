//! Context process: the engine, the memory and the channels of one vGPU.
//!
//! A process that maps what a tenant passes can be held by that tenant: a page fault or `mmap` in a
//! tenant's file lasts as long as the tenant makes it last. Therefore each vGPU of a GPU without
//! hardware of its own has a process. The GPU process is the arbiter: it gives turns on the engine,
//! and touches nothing of a tenant. A context that is held holds itself alone.
//!
//! The context listens for arbiters. When the GPU process ends, the context pauses until the next
//! one connects. It keeps its memory, its channels and its worker.
//!
//! * [`turns`]: when the engine may run
//! * [`serve`]: the process

pub mod turns;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use foreign_fds::ForeignFd;
use ipc::mem::Mapping;
use ipc::seqpacket::{self, MAX_PACKET, SeqPacket, SeqPacketListener};
use mdev_core::gpu::ClientSpec;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{Shutdown, shutdown};

use self::turns::Turns;
use super::arbiter::link::{HELLO_FDS, Order};
use super::emulation::EmulatedGpu;
use super::emulation::vgpu::Vgpu;
use super::hardware::Hardware;
use super::server::WorkerConnection;
use super::turn_page::{PAGE_BYTES, TurnPage};
use super::wire;

/// Stack of the thread that serves the worker: the size of a main thread's.
const WORKER_STACK_BYTES: usize = 8 << 20;
/// Pause after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves a vGPU until its worker closes the connection `worker`, or the manager evicts it.
/// Arbiters connect to `arbiters`.
///
/// # Errors
///
/// Fails if the host has no resources for the vGPU.
pub fn serve(
    hardware: Arc<dyn Hardware>,
    spec: &ClientSpec,
    worker: OwnedFd,
    arbiters: SeqPacketListener,
) -> io::Result<()> {
    let turns = Arc::new(Turns::default());
    let (gpu, engine) = EmulatedGpu::in_turns(hardware, Arc::clone(&turns))?;
    let gpu = Arc::new(gpu);
    let (vgpu, fds) =
        gpu.admit(spec).map_err(|refusal| io::Error::other(format!("{refusal:?}")))?;
    let worker = SeqPacket::from(worker);
    let control = Control {
        turns: Arc::clone(&turns),
        vgpu: Arc::clone(&vgpu),
        worker: worker.as_fd().try_clone_to_owned()?,
    };
    let ending = arbiters.as_fd().try_clone_to_owned()?;
    let builder = thread::Builder::new().name("gpu-arbiter".into()).stack_size(256 << 10);
    let thread = builder.spawn(move || control.serve(&arbiters))?;
    let connection = WorkerConnection::of_context(Arc::clone(&gpu), vgpu, fds, worker, turns);
    let builder = thread::Builder::new().name("gpu-worker".into()).stack_size(WORKER_STACK_BYTES);
    let of_worker = builder.spawn(move || {
        let _ends = EndsEngine(gpu);
        connection.serve();
    })?;
    // On the main thread: the arbiter has the kernel's count of this one's delays.
    engine.run();
    // Ends the other thread, which listens.
    let _ = shutdown(ending.as_raw_fd(), Shutdown::Both);
    let _ = thread.join();
    let _ = of_worker.join();
    Ok(())
}

/// Ends the engine, also when its thread panics.
struct EndsEngine(Arc<EmulatedGpu>);

impl Drop for EndsEngine {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// What a message of an arbiter means for its connection.
enum Next {
    Goes,
    Begins,
    Ends,
}

/// What arbiters control.
struct Control {
    turns: Arc<Turns>,
    vgpu: Arc<Vgpu>,
    worker: OwnedFd,
}

impl Control {
    /// Serves one arbiter after the other. One that says hello follows one that has ended.
    fn serve(&self, listener: &SeqPacketListener) {
        let mut arbiters: Vec<SeqPacket> = Vec::new();
        loop {
            let mut fds = vec![PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
            fds.extend(arbiters.iter().map(|it| PollFd::new(it.as_fd(), PollFlags::POLLIN)));
            if poll(&mut fds, PollTimeout::NONE).is_err() {
                continue;
            }
            let events: Vec<_> =
                fds.iter().map(|fd| fd.revents().unwrap_or(PollFlags::empty())).collect();
            drop(fds);
            if events[0].contains(PollFlags::POLLHUP) {
                return;
            }
            for index in (0..arbiters.len()).rev().filter(|index| !events[index + 1].is_empty()) {
                match self.serve_next(&arbiters[index]) {
                    Next::Goes => {}
                    // The others have ended, or were never admitted.
                    Next::Begins => arbiters = vec![arbiters.swap_remove(index)],
                    Next::Ends => drop(arbiters.swap_remove(index)),
                }
                if arbiters.is_empty() {
                    log::info!("vGPU {}: waiting for its GPU process", self.vgpu.id());
                    self.turns.disconnect();
                }
                if arbiters.len() <= 1 {
                    break;
                }
            }
            if events[0].contains(PollFlags::POLLIN) {
                match listener.accept() {
                    Ok(socket) => arbiters.push(socket),
                    Err(error) => {
                        log::warn!("Cannot accept a GPU process: {error}");
                        thread::sleep(ACCEPT_PAUSE);
                    }
                }
            }
        }
    }

    /// Carries an order out.
    fn serve_next(&self, arbiter: &SeqPacket) -> Next {
        let mut buffer = vec![0; MAX_PACKET];
        let Ok(Some(packet)) = arbiter.recv_with_fds(&mut buffer) else { return Next::Ends };
        let Ok(order) = seqpacket::decode::<Order>(&buffer[..packet.len]) else {
            return Next::Ends;
        };
        match order {
            Order::Hello { version } => {
                let connected = wire::is_spoken(version) && self.connect(packet.fds).is_some();
                return if connected { Next::Begins } else { Next::Ends };
            }
            Order::SetQuotas(quotas) => {
                let _ = self.vgpu.set_quotas(&quotas);
            }
            Order::Reset => {
                let _ = self.vgpu.reset_channels();
            }
            Order::End => {
                // The worker's connection ends, and then the process.
                let _ = shutdown(self.worker.as_raw_fd(), Shutdown::Both);
            }
        }
        Next::Goes
    }

    fn connect(&self, fds: Vec<ForeignFd>) -> Option<()> {
        // The GPU process is trusted.
        let fds: Vec<_> = fds.into_iter().map(ForeignFd::into_trusted).collect();
        let [page, bell] = <[OwnedFd; HELLO_FDS]>::try_from(fds).ok()?;
        let page = Mapping::new(page.as_fd(), 0, PAGE_BYTES, true).ok()?;
        let usage = self.vgpu.usage();
        self.turns.connect(TurnPage::new(page)?, bell, &usage);
        Some(())
    }
}
