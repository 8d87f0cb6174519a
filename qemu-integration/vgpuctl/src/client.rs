//! The control API's client: one HTTP/1.1 request on a UNIX socket per question.

use std::error::Error as _;
use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::HeaderValue;
use hyper::upgrade::Upgraded;
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use mdev_core::ids::VgpuId;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::net::UnixStream;
use vfio_user_server::api::consoles::PROTOCOL;
use vfio_user_server::api::model::{ErrorBody, Vgpu};

use crate::failure::Failure;

/// Longest answer that is read: a picture of the largest screen is well below.
const MAX_ANSWER: usize = 256 << 20;
/// Longer than anything that vgpud does for one request.
const PATIENCE: Duration = Duration::from_secs(60);

/// Who answers at a socket.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    patience: Duration,
}

impl Client {
    /// A client of the manager at `socket`. Nothing is connected yet.
    pub fn new(socket: PathBuf) -> Self {
        Self { socket, patience: PATIENCE }
    }

    /// Where it is.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Reads something.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        self.parse(&self.send(Method::GET, path, Bytes::new()).await?)
    }

    /// Reads something that is not JSON.
    pub async fn get_bytes(&self, path: &str) -> Result<Bytes, Failure> {
        self.send(Method::GET, path, Bytes::new()).await
    }

    /// Asks for something to be made or done, and reads what came of it. `()` is no body.
    pub async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, Failure> {
        self.parse(&self.send(Method::POST, path, json(body)?).await?)
    }

    /// Asks for something to be done. `()` is no body.
    pub async fn order(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> Result<(), Failure> {
        self.send(method, path, json(body)?).await.map(drop)
    }

    /// A vGPU, or `None` where there is none.
    pub async fn find(&self, id: VgpuId) -> Result<Option<Vgpu>, Failure> {
        match self.get(&vgpu_path(id)).await {
            Ok(vgpu) => Ok(Some(vgpu)),
            Err(failure) if failure.exit_status() == 4 => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// A vGPU that must be there, and on that parent where one is named.
    pub async fn vgpu(&self, id: VgpuId, parent: Option<&str>) -> Result<Vgpu, Failure> {
        let vgpu = self.find(id).await?.ok_or(Failure::NoVgpu(id))?;
        match parent {
            Some(parent) if vgpu.parent != parent => Err(Failure::Usage(format!(
                "vGPU {id} is on parent {}, not {parent}; leave --parent out, or name that one",
                vgpu.parent
            ))),
            _ => Ok(vgpu),
        }
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Bytes, Failure> {
        let (status, bytes) = self.patiently(self.exchange(method, path, body)).await?;
        if status.is_success() {
            return Ok(bytes);
        }
        Err(self.refusal(status, &bytes))
    }

    /// Opens a screen: a connection that speaks RFB from here on.
    pub async fn upgrade(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<TokioIo<Upgraded>, Failure> {
        let lost = |error: hyper::Error| self.lost(&error);
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(self.connect().await?)).await.map_err(lost)?;
        // It ends with the connection, which whoever has the screen ends.
        tokio::spawn(connection.with_upgrades());
        let mut request = request(Method::POST, path, json(body)?)?;
        let headers = request.headers_mut();
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static(PROTOCOL));
        let asked = async { sender.send_request(request).await.map_err(lost) };
        let answer = self.patiently(asked).await?;
        if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
            return Ok(TokioIo::new(hyper::upgrade::on(answer).await.map_err(lost)?));
        }
        let status = answer.status();
        let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
        let bytes = body.map_err(|error| self.nonsense(error.to_string()))?.to_bytes();
        Err(self.refusal(status, &bytes))
    }

    async fn connect(&self) -> Result<UnixStream, Failure> {
        UnixStream::connect(&self.socket).await.map_err(|error| {
            let socket = self.socket.clone();
            match error.kind() {
                io::ErrorKind::PermissionDenied => {
                    Failure::NotForUs { socket, user: nix::unistd::geteuid().as_raw() }
                }
                _ => Failure::Unreachable { socket, reason: error.to_string() },
            }
        })
    }

    fn refusal(&self, status: StatusCode, bytes: &[u8]) -> Failure {
        match serde_json::from_slice::<ErrorBody>(bytes) {
            Ok(body) => Failure::Refused(body.error),
            Err(_) => self.nonsense(format!("status {status} without a reason")),
        }
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(StatusCode, Bytes), Failure> {
        let stream = self.connect().await?;
        let lost = |error: hyper::Error| self.lost(&error);
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(lost)?;
        let request = request(method, path, body)?;
        let ask = async {
            let answer = sender.send_request(request).await.map_err(lost)?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
            let body = body.map_err(|error| self.nonsense(error.to_string()))?;
            Ok((status, body.to_bytes()))
        };
        tokio::pin!(connection);
        tokio::pin!(ask);
        // The connection's task is polled here too: this side needs no second one.
        let mut open = true;
        loop {
            tokio::select! {
                answer = &mut ask => return answer,
                end = &mut connection, if open => {
                    end.map_err(lost)?;
                    open = false;
                }
            }
        }
    }

    fn parse<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T, Failure> {
        serde_json::from_slice(bytes).map_err(|error| self.nonsense(error.to_string()))
    }

    /// Waits for an answer, though not for ever.
    async fn patiently<T>(
        &self,
        answer: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        tokio::time::timeout(self.patience, answer).await.unwrap_or_else(|_| {
            Err(self.nonsense(format!("none came within {} s", self.patience.as_secs())))
        })
    }

    /// What became of a connection that has given no answer.
    fn lost(&self, error: &hyper::Error) -> Failure {
        let broken = error.source().is_some_and(<dyn std::error::Error>::is::<io::Error>);
        if broken || error.is_incomplete_message() || error.is_canceled() || error.is_closed() {
            return Failure::Closed { socket: self.socket.clone() };
        }
        self.nonsense(error.to_string())
    }

    fn nonsense(&self, reason: String) -> Failure {
        Failure::Nonsense { socket: self.socket.clone(), reason }
    }
}

fn request(method: Method, path: &str, body: Bytes) -> Result<Request<Full<Bytes>>, Failure> {
    Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "vgpud")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(body))
        .map_err(unaskable)
}

fn json(body: &impl Serialize) -> Result<Bytes, Failure> {
    match serde_json::to_value(body) {
        Ok(Value::Null) => Ok(Bytes::new()),
        Ok(value) => Ok(Bytes::from(value.to_string())),
        Err(error) => Err(unaskable(error)),
    }
}

/// What cannot be written as a request: names are checked before they are asked about.
fn unaskable(error: impl Display) -> Failure {
    Failure::Local(format!("Cannot ask vgpud: {error}"))
}

/// Where a vGPU is in the API.
pub fn vgpu_path(id: VgpuId) -> String {
    format!("/v1/vgpus/{id}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(client: &Client, path: &str) -> String {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(client.get::<Value>(path)).unwrap_err().to_string()
    }

    #[test]
    fn what_never_answers_is_not_waited_for_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let _listens = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let client = Client { patience: Duration::from_millis(20), ..Client::new(socket) };
        let said = failure(&client, "/v1/version");
        assert!(said.ends_with("makes sense: none came within 0 s; see its log"), "{said}");
        let said = failure(&client, "/v1/a b");
        assert!(said.starts_with("Cannot ask vgpud: invalid uri"), "{said}");
    }
}
