//! Client of the control API. Each request is HTTP/1.1 on a new UNIX socket connection.

use std::error::Error as _;
use std::fmt::Display;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::{Duration, Instant};

use http_body_util::channel::Channel;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Body, Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::HeaderValue;
use hyper::upgrade::Upgraded;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use mdev_core::untrusted::{self, VALUE};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use vgpud_api::{ErrorBody, RFB_UPGRADE, SAVED_VGPU, Vgpu};
use vgpud_host::body::BodyReader;

use crate::error::ClientError;
use crate::file_sender::FileSender;

/// Maximum size of a response in bytes. A picture of the largest screen stays well below this.
const MAX_RESPONSE: usize = 256 << 20;
/// Timeout of a request; longer than any operation of vgpud.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Pause between attempts to connect while the socket has no room for a connection.
const CONNECT_PAUSE: Duration = Duration::from_millis(2);

/// Time without an answer after which [`Client::on_silence`] is called.
const NOTE_AFTER: Duration = Duration::from_secs(5);

/// Client of the manager at a control socket.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    timeout: Duration,
    on_silence: fn(Duration),
}

impl Client {
    /// Creates a client without connecting.
    pub fn new(socket: PathBuf) -> Self {
        Self { socket, timeout: REQUEST_TIMEOUT, on_silence: |_| () }
    }

    /// Returns a client that calls `note` once per program if vgpud takes long to answer: systemd
    /// accepts connections also for a vgpud that cannot start.
    #[must_use]
    pub fn on_silence(self, note: fn(Duration)) -> Self {
        Self { on_silence: note, ..self }
    }

    /// Returns a client of the same socket whose requests have a shorter timeout.
    #[must_use]
    pub fn with_limit(&self, timeout: Duration) -> Self {
        Self { timeout, ..self.clone() }
    }

    /// Returns the path of the control socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sends a GET request and parses the JSON response.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.parse(&self.send(Method::GET, path, Bytes::new()).await?)
    }

    /// Sends a GET request and returns the response body.
    pub async fn get_bytes(&self, path: &str) -> Result<Bytes, ClientError> {
        self.send(Method::GET, path, Bytes::new()).await
    }

    /// Sends a POST request and parses the JSON response. A body of `()` is empty.
    pub async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        self.parse(&self.send(Method::POST, path, json(body)?).await?)
    }

    /// Sends a request and ignores the response body. A body of `()` is empty.
    pub async fn request(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> Result<(), ClientError> {
        self.send(method, path, json(body)?).await.map(drop)
    }

    /// Returns a vGPU, or `None` if it does not exist.
    pub async fn find(&self, vgpu: impl Display) -> Result<Option<Vgpu>, ClientError> {
        match self.get(&vgpu_path(vgpu)).await {
            Ok(vgpu) => Ok(Some(vgpu)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns a vGPU. Fails if it does not exist or is not on the named parent.
    pub async fn vgpu(&self, id: impl Display, parent: Option<&str>) -> Result<Vgpu, ClientError> {
        let found = self.find(&id).await?;
        let vgpu = found.ok_or_else(|| ClientError::NoVgpu(id.to_string()))?;
        match parent {
            Some(parent) if vgpu.parent != parent => Err(ClientError::OtherParent {
                vgpu: id.to_string(),
                named: parent.to_owned(),
                parent: vgpu.parent,
            }),
            _ => Ok(vgpu),
        }
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Bytes, ClientError> {
        let response = async {
            let stream = self.connect().await?;
            let response = self.begin_on(stream, build_request(method, path, body)?).await?;
            self.body_of(response).await
        };
        let (status, bytes) = self.with_timeout(response).await?;
        if status.is_success() { Ok(bytes) } else { Err(self.refusal(status, &bytes)) }
    }

    /// Opens a screen and returns its connection, upgraded to RFB.
    pub async fn upgrade(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<TokioIo<Upgraded>, ClientError> {
        let stream = self.connect().await?;
        let mut request = build_request(Method::POST, path, json(body)?)?;
        let headers = request.headers_mut();
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static(RFB_UPGRADE));
        let response = self.with_timeout(self.begin_on(stream, request)).await?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let upgraded = hyper::upgrade::on(response).await;
            return Ok(TokioIo::new(upgraded.map_err(|error| self.lost(&error))?));
        }
        Err(self.refusal_of(response).await)
    }

    /// Sends a POST request whose response is a stream, which a blocking thread reads.
    pub async fn post_for_stream(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<BodyReader, ClientError> {
        let request = build_request(Method::POST, path, json(body)?)?;
        let response = self.with_timeout(self.begin(request)).await?;
        let status = response.status();
        if status.is_success() {
            return Ok(BodyReader::new(response.into_body()));
        }
        Err(self.refusal_of(response).await)
    }

    /// Sends a POST request with a stream as body, and parses the JSON response.
    pub async fn post_stream<T: DeserializeOwned>(
        &self,
        path: &str,
        body: Channel<Bytes, io::Error>,
    ) -> Result<T, ClientError> {
        let request = build_request_with(Method::POST, path, SAVED_VGPU, body)?;
        self.parsed(self.begin(request).await?).await
    }

    /// Sends a POST request with a file, which the manager reads, and parses the JSON response.
    pub async fn post_with_file<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        file: File,
    ) -> Result<T, ClientError> {
        let request = build_request(Method::POST, path, json(body)?)?;
        let stream = FileSender::new(self.connect().await?, file);
        self.parsed(self.begin_on(stream, request).await?).await
    }

    async fn parsed<T: DeserializeOwned>(
        &self,
        response: Response<Incoming>,
    ) -> Result<T, ClientError> {
        let (status, bytes) = self.body_of(response).await?;
        if status.is_success() { self.parse(&bytes) } else { Err(self.refusal(status, &bytes)) }
    }

    /// Sends a request and returns the response, whose body has not arrived.
    async fn begin<B>(&self, request: Request<B>) -> Result<Response<Incoming>, ClientError>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        self.begin_on(self.connect().await?, request).await
    }

    async fn begin_on<B>(
        &self,
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        request: Request<B>,
    ) -> Result<Response<Incoming>, ClientError>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let lost = |error: hyper::Error| self.lost(&error);
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(lost)?;
        // The task ends with the response, or when the caller drops an upgraded connection.
        tokio::spawn(connection.with_upgrades());
        sender.send_request(request).await.map_err(lost)
    }

    async fn refusal_of(&self, response: Response<Incoming>) -> ClientError {
        match self.body_of(response).await {
            Ok((status, bytes)) => self.refusal(status, &bytes),
            Err(error) => error,
        }
    }

    async fn body_of(
        &self,
        response: Response<Incoming>,
    ) -> Result<(StatusCode, Bytes), ClientError> {
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_RESPONSE).collect().await;
        let body = body.map_err(|error| self.invalid_response(error.to_string()))?;
        Ok((status, body.to_bytes()))
    }

    async fn connect(&self) -> Result<UnixStream, ClientError> {
        let begun = Instant::now();
        let connected = loop {
            match UnixStream::connect(&self.socket).await {
                // Others connect faster than vgpud accepts. Asynchronous sockets do not wait.
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock
                        && begun.elapsed() < self.timeout =>
                {
                    tokio::time::sleep(CONNECT_PAUSE).await;
                }
                connected => break connected,
            }
        };
        connected.map_err(|error| {
            let socket = self.socket.clone();
            match error.kind() {
                io::ErrorKind::PermissionDenied => {
                    ClientError::PermissionDenied { socket, user: nix::unistd::geteuid().as_raw() }
                }
                io::ErrorKind::NotFound => match manager_beside(&socket) {
                    Some(pid) => ClientError::NoSocket { socket, pid },
                    None => ClientError::Unreachable { socket, reason: error.to_string() },
                },
                _ => ClientError::Unreachable { socket, reason: error.to_string() },
            }
        })
    }

    fn refusal(&self, status: StatusCode, bytes: &[u8]) -> ClientError {
        match serde_json::from_slice::<ErrorBody>(bytes) {
            Ok(mut body) => {
                body.error.message = untrusted::message(&body.error.message);
                ClientError::Refused(body.error)
            }
            Err(_) => self.invalid_response(format!("status {status} without a reason")),
        }
    }

    fn parse<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T, ClientError> {
        let invalid = |error: serde_json::Error| self.invalid_response(error.to_string());
        let value: Value = serde_json::from_slice(bytes).map_err(invalid)?;
        if has_control(&value) {
            return serde_json::from_value(shown(value)).map_err(invalid);
        }
        serde_json::from_slice(bytes).map_err(invalid)
    }

    /// Waits for a response until the timeout.
    async fn with_timeout<T>(
        &self,
        response: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        let response = tokio::time::timeout(self.timeout, response);
        tokio::pin!(response);
        let early = tokio::time::timeout(NOTE_AFTER, &mut response).await;
        let answer = if let Ok(answer) = early {
            answer
        } else {
            static ONCE: Once = Once::new();
            ONCE.call_once(|| (self.on_silence)(NOTE_AFTER));
            response.await
        };
        answer.unwrap_or_else(|_| {
            Err(self.invalid_response(format!("timeout after {} s", self.timeout.as_secs())))
        })
    }

    /// Returns the error for a connection that ended without a response.
    fn lost(&self, error: &hyper::Error) -> ClientError {
        let broken = error.source().is_some_and(<dyn std::error::Error>::is::<io::Error>);
        if broken || error.is_incomplete_message() || error.is_canceled() || error.is_closed() {
            return ClientError::Closed { socket: self.socket.clone() };
        }
        self.invalid_response(error.to_string())
    }

    fn invalid_response(&self, reason: String) -> ClientError {
        ClientError::InvalidResponse { socket: self.socket.clone(), reason }
    }
}

/// Returns the process ID of the vgpud that runs in the run directory of a control socket.
fn manager_beside(socket: &Path) -> Option<u32> {
    // A manager holds this file and writes its process ID into it. The file outlives the manager.
    let lock = untrusted::read_text(&socket.with_file_name("lock"), VALUE).ok()?;
    let pid = lock.trim().parse().ok()?;
    let name = untrusted::read_text(Path::new(&format!("/proc/{pid}/comm")), VALUE).ok()?;
    (name.trim_end() == "vgpud").then_some(pid)
}

fn build_request(
    method: Method,
    path: &str,
    body: Bytes,
) -> Result<Request<Full<Bytes>>, ClientError> {
    build_request_with(method, path, "application/json", Full::new(body))
}

fn build_request_with<B>(
    method: Method,
    path: &str,
    content: &'static str,
    body: B,
) -> Result<Request<B>, ClientError> {
    Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "vgpud")
        .header(header::CONTENT_TYPE, content)
        .body(body)
        .map_err(invalid_request)
}

fn json(body: &impl Serialize) -> Result<Bytes, ClientError> {
    match serde_json::to_value(body) {
        Ok(Value::Null) => Ok(Bytes::new()),
        Ok(value) => Ok(Bytes::from(value.to_string())),
        Err(error) => Err(invalid_request(error)),
    }
}

/// Returns the error for a request that cannot be encoded, for example due to its path.
fn invalid_request(error: impl Display) -> ClientError {
    ClientError::Encode(format!("Cannot encode the request to vgpud: {error}"))
}

/// Returns the API path of a vGPU, by its UUID or name.
pub fn vgpu_path(vgpu: impl Display) -> String {
    format!("/v1/vgpus/{vgpu}")
}

/// Returns whether a text of a response has control characters: it may come from a VM.
fn has_control(value: &Value) -> bool {
    match value {
        Value::String(string) => untrusted::has_control(string),
        Value::Array(items) => items.iter().any(has_control),
        Value::Object(members) => members.values().any(has_control),
        _ => false,
    }
}

/// Returns a response with all texts as single lines without control characters.
fn shown(value: Value) -> Value {
    match value {
        Value::String(string) => Value::String(untrusted::one_line(&string, string.len())),
        Value::Array(items) => items.into_iter().map(shown).collect(),
        Value::Object(members) => {
            members.into_iter().map(|(name, value)| (name, shown(value))).collect()
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(client: &Client, path: &str) -> String {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(client.get::<Value>(path)).unwrap_err().to_string()
    }

    #[test]
    fn requests_time_out_and_invalid_paths_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let _listens = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let client = Client { timeout: Duration::from_millis(20), ..Client::new(socket) };
        let said = failure(&client, "/v1/version");
        assert!(said.ends_with("no valid response: timeout after 0 s; see its log"), "{said}");
        let said = failure(&client, "/v1/a b");
        assert!(said.starts_with("Cannot encode the request to vgpud: invalid uri"), "{said}");
    }

    #[test]
    fn a_socket_without_room_for_a_connection_is_tried_again() {
        use nix::sys::socket::{Backlog, listen};
        use std::io::{Read, Write};
        use std::task::{Context, Waker};
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        listen(&listener, Backlog::new(0).unwrap()).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut waiting = Vec::new();
            while let Ok(stream) = UnixStream::connect(&socket).await {
                waiting.push(stream);
            }
            let client = Client::new(socket);
            let mut answer = std::pin::pin!(client.get::<u32>("/"));
            // One attempt at least is made before there is room.
            let mut context = Context::from_waker(Waker::noop());
            assert!(answer.as_mut().poll(&mut context).is_pending());
            let server = std::thread::spawn(move || {
                for _ in 0..waiting.len() {
                    listener.accept().unwrap();
                }
                let (mut stream, _) = listener.accept().unwrap();
                let _ = stream.read(&mut [0; 1024]).unwrap();
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n7").unwrap();
            });
            assert_eq!(answer.await.unwrap(), 7);
            server.join().unwrap();
        });
    }
}
