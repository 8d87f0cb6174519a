//! `checkpoint`: CUDA programs of a VM that wait with their state in the VM's memory, so that the
//! VM's vGPUs can be saved.

use std::time::{Duration, Instant};

use tokio::signal::unix::{SignalKind, signal};
use vgpud_api::{Checkpoint as Answer, Vgpu};
use vgpud_client::{Client, vgpu_path};

use super::saving;
use crate::cli::Checkpoint;
use crate::failure::Failure;

/// Longest time for a VM to checkpoint its programs: it copies up to all video memory.
const LIMIT: Duration = Duration::from_secs(120);
/// Interval of questions.
const INTERVAL: Duration = Duration::from_millis(50);

/// Runs `checkpoint`.
pub async fn checkpoint(client: &Client, args: Checkpoint) -> Result<Vec<u8>, Failure> {
    let vgpu = client.vgpu(args.vgpu.vgpu()?, None).await?;
    checkpoint_vgpus(client, std::slice::from_ref(&vgpu)).await?;
    saving::described(client, vgpu.uuid, args.output).await
}

/// Does `work` with a VM whose CUDA programs are checkpointed. If it fails, they continue; if not,
/// resuming the vGPUs, or restoring them elsewhere, is a part of the work.
pub async fn with_checkpoint<T>(
    client: &Client,
    vgpus: &[Vgpu],
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let checkpointed = checkpoint_vgpus(client, vgpus).await?;
    let done = work.await;
    if done.is_err() && checkpointed {
        // The failure says more than that of a resume.
        let _ = super::vm_state::resume_vgpus(client, vgpus).await;
    }
    done
}

/// Has a VM checkpoint the programs on its vGPUs. Returns whether the VM was asked: then the vGPUs
/// are to be resumed. If a program cannot be checkpointed, all continue.
async fn checkpoint_vgpus(client: &Client, vgpus: &[Vgpu]) -> Result<bool, Failure> {
    let mut asked = false;
    let done = tokio::select! {
        done = ask(client, vgpus, &mut asked) => done,
        failure = interrupted() => Err(failure),
    };
    if done.is_err() && asked {
        // The failure says more than that of a resume.
        let _ = super::vm_state::resume_vgpus(client, vgpus).await;
    }
    done.map(|()| asked)
}

/// Asks the VM about one vGPU after the other until all are free of programs.
async fn ask(client: &Client, vgpus: &[Vgpu], asked: &mut bool) -> Result<(), Failure> {
    let end = Instant::now() + LIMIT;
    for vgpu in vgpus {
        let path = format!("{}/checkpoint", vgpu_path(vgpu.uuid));
        loop {
            match client.post::<Answer>(&path, &()).await {
                Ok(Answer { done: true }) => break,
                Ok(Answer { done: false }) => *asked = true,
                // An earlier vgpud, which refuses to save a vGPU with programs.
                Err(error) if error.is_not_found() => return Ok(()),
                Err(error) => return Err(error.into()),
            }
            if Instant::now() > end {
                return Err(Failure::NotNow(format!(
                    "The VM of vGPU {} has not checkpointed its CUDA programs for {} s; is it paused?",
                    vgpu.uuid,
                    LIMIT.as_secs()
                )));
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }
    Ok(())
}

/// Waits until the command is interrupted.
async fn interrupted() -> Failure {
    let (interrupt, terminate) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()));
    let (Ok(mut interrupt), Ok(mut terminate)) = (interrupt, terminate) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Failure::NotNow("Interrupted; the CUDA programs of the VM continue".to_owned())
}
