//! `web`: address of the web console.

use vgpud_api::{OpenWeb, WebAddress};

use super::view::absolute;
use crate::cli::{Output, Web};
use crate::client::Client;
use crate::failure::Failure;
use crate::mdevctl::pretty;

/// Runs `web`.
pub async fn web(client: &Client, args: Web) -> Result<Vec<u8>, Failure> {
    let monitors = args.monitor.into_iter().map(|(uuid, path)| Ok((uuid, absolute(&path)?)));
    let monitors = monitors.collect::<Result<_, Failure>>()?;
    let response: WebAddress = client.post("/v1/web", &OpenWeb { monitors }).await?;
    match args.output {
        Output::Json => pretty(&response),
        Output::Text => Ok(format!("{}\n", response.url).into_bytes()),
    }
}
