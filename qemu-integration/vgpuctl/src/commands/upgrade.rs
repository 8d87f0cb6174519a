//! `upgrade`: workers of vgpud's release under running VMs.

use std::fmt::Display;
use std::fmt::Write as _;

use serde_json::{Value, json};
use vgpud_api::{UpgradedVgpu, Vgpu};

use crate::cli::{Output, Upgrade};
use crate::failure::Failure;
use crate::mdevctl::pretty;
use vgpud_client::{Client, vgpu_path};

/// Runs `upgrade`. A vGPU that keeps its worker is an error only if it was named.
pub async fn upgrade(client: &Client, args: &Upgrade) -> Result<Vec<u8>, Failure> {
    let mut results = Vec::new();
    if let Some(vgpu) = args.vgpu.vgpu() {
        let upgraded = upgrade_one(client, vgpu).await?;
        results.push((vgpu.to_string(), Ok(upgraded)));
    } else {
        let all: Vec<Vgpu> = client.get("/v1/vgpus").await?;
        for vgpu in all.into_iter().filter(|vgpu| vgpu.pid.is_some()) {
            let result = upgrade_one(client, vgpu.uuid).await;
            results.push((vgpu.name.unwrap_or_else(|| vgpu.uuid.to_string()), result));
        }
    }
    match args.output {
        Output::Text => Ok(text(&results).into_bytes()),
        Output::Json => {
            pretty(&results.iter().map(|(vgpu, result)| entry(vgpu, result)).collect::<Vec<_>>())
        }
    }
}

async fn upgrade_one(client: &Client, vgpu: impl Display) -> Result<UpgradedVgpu, Failure> {
    Ok(client.post(&format!("{}/upgrade", vgpu_path(vgpu)), &()).await?)
}

type Results = [(String, Result<UpgradedVgpu, Failure>)];

fn text(results: &Results) -> String {
    let mut text = String::new();
    for (vgpu, result) in results {
        let _ = match result {
            Ok(UpgradedVgpu { pid_before, pid, .. }) => {
                writeln!(text, "{vgpu}: process {pid} follows process {pid_before}")
            }
            Err(failure) => writeln!(text, "{vgpu}: {failure}"),
        };
    }
    text
}

fn entry(vgpu: &str, result: &Result<UpgradedVgpu, Failure>) -> Value {
    match result {
        Ok(UpgradedVgpu { uuid, pid_before, pid }) => {
            json!({ "vgpu": vgpu, "uuid": uuid, "pid_before": pid_before, "pid": pid })
        }
        Err(failure) => json!({ "vgpu": vgpu, "error": failure.to_string() }),
    }
}
