//! `vm receive`.

use std::io::{PipeWriter, Write};
use std::thread;

use vgpud_api::{RestoredVgpu, Vgpu};
use vgpud_host::body::body_writer;

use super::peer::{Frame, Hello, Listener, Peer};
use crate::cli::VmReceive;
use crate::commands::saving::{self, blocking};
use crate::commands::vm_state::monitor::{Address, Monitor};
use crate::commands::vm_state::pci::Place;
use crate::commands::vm_state::{
    check_count, check_types, check_waiting, find_place, pci, qemu_stream, resume_vgpus,
    vgpus_of_vm,
};
use crate::failure::Failure;
use vgpud_client::{Client, vgpu_path};

/// Runs `vm receive`.
pub async fn receive(client: &Client, args: VmReceive) -> Result<Vec<u8>, Failure> {
    let named = client.vgpu(args.vgpu.vgpu()?, None).await?;
    let vgpus = vgpus_of_vm(client, &named).await?;
    let (mut monitor, expected) = (Address::Socket(args.monitor).connect().await?, vgpus.len());
    let listen = args.listen;
    let (mut monitor, mut peer, hello) = blocking(move || {
        check_waiting(&mut monitor)?;
        check_count(pci::count(&mut monitor)?, expected)?;
        let (peer, hello) = Listener::bind(&listen)?.accept()?;
        Ok((monitor, peer, hello))
    })
    .await?;
    let restored = match restore(client, &vgpus, &hello, monitor, peer).await {
        Ok(restored) => restored,
        Err(Refused { failure, peer }) => {
            if let Some(mut peer) = peer {
                let reason = Frame::Failed(failure.to_string());
                // The source may have gone.
                let _ = blocking(move || peer.send(&reason)).await;
            }
            return Err(failure);
        }
    };
    (monitor, peer) = restored;
    let peer = blocking(move || {
        peer.send(&Frame::Restored)?;
        peer.expect(&Frame::Go)?;
        Ok(peer)
    })
    .await?;
    // From here on this host has the VM.
    resume_vgpus(client, &vgpus).await?;
    let mut peer = peer;
    blocking(move || {
        if hello.running {
            monitor.resume()?;
        }
        peer.send(&Frame::Running)
    })
    .await?;
    saving::described(client, named.uuid, args.output).await
}

/// Failure, and the connection on which the source hears of it.
struct Refused {
    failure: Failure,
    peer: Option<Box<Peer>>,
}

/// Restores the VM and its vGPUs, which stay paused.
async fn restore(
    client: &Client,
    vgpus: &[Vgpu],
    hello: &Hello,
    monitor: Monitor,
    mut peer: Peer,
) -> Result<(Monitor, Peer), Refused> {
    if let Err(failure) = check_types(hello.types.iter(), vgpus) {
        return Err(Refused { failure, peer: Some(Box::new(peer)) });
    }
    let received = blocking(move || {
        peer.send(&Frame::Ready)?;
        Ok(receive_machine(monitor, peer))
    })
    .await;
    let (monitor, peer) = match received {
        Ok(Ok(received)) => received,
        Ok(Err(refused)) => return Err(refused),
        Err(failure) => return Err(Refused { failure, peer: None }),
    };
    let mut peer = Some(peer);
    match restore_vgpus(client, vgpus, monitor, &mut peer).await {
        Ok(monitor) => match peer {
            Some(peer) => Ok((monitor, peer)),
            None => Err(Refused { failure: lost(), peer: None }),
        },
        Err(failure) => Err(Refused { failure, peer: peer.map(Box::new) }),
    }
}

/// The thread that had the connection has ended.
fn lost() -> Failure {
    Failure::Local("The connection to the other host is lost".to_owned())
}

/// Lets QEMU read the VM.
fn receive_machine(mut monitor: Monitor, mut peer: Peer) -> Result<(Monitor, Peer), Refused> {
    // Otherwise QEMU would start the VM as soon as it has read it.
    let begun = monitor.pause().and_then(|()| qemu_stream::begin_receive(&mut monitor));
    let into = match begun {
        Ok(into) => into,
        Err(failure) => return Err(Refused { failure, peer: Some(Box::new(peer)) }),
    };
    let copying = thread::spawn(move || {
        let copied = copy_machine(&mut peer, into);
        (peer, copied)
    });
    let completed = qemu_stream::wait_received(&mut monitor, || copying.is_finished());
    let Ok((peer, copied)) = copying.join() else {
        return Err(Refused { failure: lost(), peer: None });
    };
    // QEMU's reason says more than that the pipe broke, and less than that the source has gone.
    match completed.and(copied) {
        Ok(()) => Ok((monitor, peer)),
        Err(failure) => Err(Refused { failure, peer: Some(Box::new(peer)) }),
    }
}

/// Passes QEMU's stream to QEMU.
fn copy_machine(peer: &mut Peer, mut into: PipeWriter) -> Result<(), Failure> {
    loop {
        match peer.receive()? {
            Frame::Machine(data) if data.is_empty() => return Ok(()),
            Frame::Machine(data) => into
                .write_all(&data)
                .map_err(|error| Failure::Local(format!("QEMU does not read the VM: {error}")))?,
            _ => return Err(disorder()),
        }
    }
}

fn disorder() -> Failure {
    Failure::Local("The other host sends the parts of the VM in another order".to_owned())
}

/// Restores the vGPUs at their places.
async fn restore_vgpus(
    client: &Client,
    vgpus: &[Vgpu],
    monitor: Monitor,
    peer: &mut Option<Peer>,
) -> Result<Monitor, Failure> {
    let (mut monitor, places) = pci::identify(client, monitor, vgpus).await?;
    let sent = match peer.as_mut().ok_or_else(lost)?.receive()? {
        Frame::Places(sent) if sent.len() == vgpus.len() => sent,
        _ => return Err(disorder()),
    };
    for place in sent {
        let at = find_place(Place(place), &places)?;
        let restored = restore_vgpu(client, &vgpus[at], peer).await?;
        let place = places[at];
        monitor = pci::program(monitor, place, restored).await?;
    }
    Ok(monitor)
}

/// Restores a vGPU from the next stream.
async fn restore_vgpu(
    client: &Client,
    vgpu: &Vgpu,
    peer: &mut Option<Peer>,
) -> Result<RestoredVgpu, Failure> {
    let (mut writer, body) = body_writer();
    let mut from = peer.take().ok_or_else(lost)?;
    let passed = blocking(move || {
        let mut passed = Ok(());
        loop {
            match from.receive() {
                Ok(Frame::Vgpu(data)) if data.is_empty() => break,
                // What vgpud does not take any more is dropped: vgpud says why.
                Ok(Frame::Vgpu(data)) => {
                    if passed.is_ok() {
                        passed = writer.write_all(&data);
                    }
                }
                Ok(_) => return Ok((from, Err(disorder()))),
                Err(failure) => return Ok((from, Err(failure))),
            }
        }
        let passed = passed.and_then(|()| writer.flush());
        let passed = passed.map_err(|error| Failure::Local(format!("vgpud has gone: {error}")));
        Ok((from, passed))
    });
    let path = format!("{}/restore", vgpu_path(vgpu.uuid));
    let (restored, passed) = tokio::join!(client.post_stream(&path, body), passed);
    let (from, passed) = passed?;
    *peer = Some(from);
    // vgpud's reason says more than that the connection broke.
    let restored = restored?;
    passed.map(|()| restored)
}
