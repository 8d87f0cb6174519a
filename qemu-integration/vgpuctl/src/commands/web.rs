//! `web`: address of the web console.

use std::collections::BTreeMap;

use mdev_core::definition::VgpuRef;
use vgpud_api::{OpenWeb, WebAddress};

use super::view::absolute;
use crate::cli::{Output, Web};
use crate::failure::Failure;
use crate::mdevctl::pretty;
use vgpud_client::Client;

/// Runs `web`.
pub async fn web(client: &Client, args: Web) -> Result<Vec<u8>, Failure> {
    let mut monitors = BTreeMap::new();
    for (vgpu, path) in args.monitor {
        let id = match vgpu {
            VgpuRef::Id(id) => id,
            VgpuRef::Name(_) => client.vgpu(vgpu, None).await?.uuid,
        };
        monitors.insert(id, absolute(&path)?);
    }
    let response: WebAddress = client.post("/v1/web", &OpenWeb { monitors }).await?;
    match args.output {
        Output::Json => pretty(&response),
        Output::Text => Ok(format!("{}\n", response.url).into_bytes()),
    }
}
