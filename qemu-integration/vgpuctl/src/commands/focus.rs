//! `focus`: physical screens.

use std::fmt::Write as _;

use mdev_core::definition::VgpuRef;
use vgpud_api::{ErrorCode, Focused, Parent, PhysicalScreen, Rotate, Vgpu};

use super::read::{called, no_parent};
use crate::cli::{Focus as Args, Output, RotationInterval};
use crate::failure::Failure;
use crate::mdevctl::pretty;
use vgpud_client::{Client, vgpu_path};

/// Runs `focus`.
pub async fn focus(client: &Client, args: Args) -> Result<Vec<u8>, Failure> {
    if let Some(vgpu) = args.vgpu.vgpu() {
        return show(client, vgpu, args.output).await;
    }
    let parents: Vec<Parent> = client.get("/v1/parents").await?;
    if let Some(interval) = args.rotate {
        let parent = match args.parent {
            Some(parent) => parent,
            None => only_screen(&parents)?,
        };
        return rotate(client, &parent, interval, args.output).await;
    }
    let names: Vec<_> = parents.iter().map(|parent| parent.name.clone()).collect();
    if let Some(parent) = args.parent.as_ref().filter(|parent| !names.contains(parent)) {
        return Err(no_parent(parent, &names));
    }
    let asked = |parent: &Parent| args.parent.as_ref().is_none_or(|name| parent.name == *name);
    let screens: Vec<_> =
        parents.into_iter().filter(asked).filter_map(|parent| parent.screen).collect();
    match args.output {
        Output::Json => pretty(&screens),
        Output::Text if screens.is_empty() => {
            Ok(b"There is no physical screen; use `vgpuctl view UUID` to show a vGPU's screen\n"
                .to_vec())
        }
        Output::Text => {
            let vgpus: Vec<Vgpu> = client.get("/v1/vgpus").await?;
            Ok(screens.iter().map(|screen| line(screen, &vgpus)).collect::<String>().into_bytes())
        }
    }
}

/// Shows a vGPU on its parent's screen.
async fn show(client: &Client, vgpu: &VgpuRef, output: Output) -> Result<Vec<u8>, Failure> {
    let shown: Focused = client.post(&format!("{}/focus", vgpu_path(vgpu)), &()).await?;
    output.result(&shown)
}

/// Starts or ends rotation of a parent's screen between its vGPUs.
async fn rotate(
    client: &Client,
    parent: &str,
    interval: RotationInterval,
    output: Output,
) -> Result<Vec<u8>, Failure> {
    let path = format!("/v1/parents/{parent}/rotation");
    let screen: PhysicalScreen = client.post(&path, &Rotate { seconds: interval.0 }).await?;
    output.result(&screen)
}

/// Returns the only parent with a screen. Fails if there is none or there are several.
fn only_screen(parents: &[Parent]) -> Result<String, Failure> {
    let candidates: Vec<_> = parents.iter().filter(|parent| parent.screen.is_some()).collect();
    match candidates.as_slice() {
        [only] => Ok(only.name.clone()),
        [] => {
            let message = "No parent has a physical screen".to_owned();
            Err(Failure::refused(ErrorCode::Conflict, message))
        }
        several => {
            let names: Vec<_> = several.iter().map(|parent| parent.name.as_str()).collect();
            let message =
                format!("Several parents have a screen; name one with -p: {}", names.join(", "));
            Err(Failure::Usage(message))
        }
    }
}

fn line(screen: &PhysicalScreen, vgpus: &[Vgpu]) -> String {
    let mut line = format!("{} ", screen.parent);
    // Writing to a String does not fail.
    let _ = match screen.focus {
        Some(uuid) => write!(line, "{}", called(uuid, vgpus)),
        None => write!(line, "none"),
    };
    if let Some(seconds) = screen.rotate_seconds {
        let _ = write!(line, " (rotates every {seconds} s)");
    }
    line + "\n"
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parent(name: &str, screen: bool) -> Parent {
        let physical = json!({ "parent": name, "focus": null, "rotate_seconds": null });
        serde_json::from_value(json!({
            "name": name, "backend": "vfio", "model": "", "description": "", "state": "ready",
            "vram_bytes": 0, "vram_free_bytes": 0, "capabilities": [], "scheduler": "weighted",
            "pid": null, "running": 0, "screen": screen.then_some(physical),
        }))
        .unwrap()
    }

    #[test]
    fn the_only_screen_is_the_default() {
        let (a, b, none) = (parent("a", true), parent("b", true), parent("c", false));
        assert_eq!(only_screen(&[none.clone(), a.clone()]).unwrap(), "a");
        let several = only_screen(&[a, none.clone(), b]).unwrap_err().to_string();
        assert_eq!(several, "Several parents have a screen; name one with -p: a, b");
        let refused = only_screen(&[none]).unwrap_err().to_string();
        assert_eq!(refused, "No parent has a physical screen");
    }
}
