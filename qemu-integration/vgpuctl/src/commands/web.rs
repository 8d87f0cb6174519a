//! `web`

use vfio_user_server::api::model::{OpenWeb, WebAddress};

use super::view::whole;
use crate::cli::{Output, Web};
use crate::client::Client;
use crate::failure::Failure;
use crate::mdevctl::pretty;

/// `web`
pub async fn web(client: &Client, args: Web) -> Result<Vec<u8>, Failure> {
    let monitors = args.monitor.into_iter().map(|(uuid, path)| Ok((uuid, whole(&path)?)));
    let monitors = monitors.collect::<Result<_, Failure>>()?;
    let answer: WebAddress = client.post("/v1/web", &OpenWeb { monitors }).await?;
    match args.output {
        Output::Json => pretty(&answer),
        Output::Text => Ok(format!("{}\n", answer.url).into_bytes()),
    }
}
