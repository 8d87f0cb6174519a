//! Clients that hold connections of the manager's listeners keep no one out.

// Clippy recognizes only functions marked as tests, not the functions that they call.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::{Value, json};
use system_tests::user::User;
use system_tests::{TIMEOUT, Vgpud, skipped, wait_for};

/// Connections that a hostile client holds, and descriptors that the manager has for them at most.
const HELD: usize = 600;
const MAX_DESCRIPTORS: usize = 400;

/// Lets this process open enough connections. Returns false where it must not.
fn may_open_connections() -> Result<bool> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if hard < 2048 {
        skipped("the limit of open files is below 2048");
        return Ok(false);
    }
    setrlimit(Resource::RLIMIT_NOFILE, hard.min(8192), hard)?;
    Ok(true)
}

fn descriptors(vgpud: &Vgpud) -> Result<usize> {
    let pid = vgpud.pid().context("The manager has ended")?;
    Ok(fs::read_dir(format!("/proc/{pid}/fd"))?.count())
}

#[test]
fn reader_with_many_connections_leaves_room_for_administrators() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        skipped("another user needs root");
        return Ok(());
    }
    if !may_open_connections()? {
        return Ok(());
    }
    let vgpud = Vgpud::start_with(&["--group", "65534"])?;
    let reader = User { uid: 65_534, gid: 65_534, groups: &[] };
    let held = reader.run(|| {
        // A connection that the manager has closed counts as well: the reader opens another.
        let open = (0..HELD).filter_map(|_| UnixStream::connect(vgpud.api_socket()).ok());
        Ok(open.collect::<Vec<_>>())
    })?;
    ensure!(held.len() > HELD / 2, "{} connections", held.len());
    vgpud.get("/v1/version").context("The administrator")?;
    vgpud.create(&json!({ "mdev_type": "SOFT-256MC", "run": true }))?;
    ensure!(descriptors(&vgpud)? < MAX_DESCRIPTORS, "{} descriptors", descriptors(&vgpud)?);
    // The reader is told, on a connection without a place.
    let mut last = held.last().context("no connection")?;
    last.set_read_timeout(Some(TIMEOUT))?;
    let mut answer = String::new();
    last.read_to_string(&mut answer)?;
    ensure!(answer.contains("503") && answer.contains("Too many connections"), "{answer:?}");
    drop(held);
    // Its places are free again.
    wait_for("the reader gets in", || reader.run(|| vgpud.get("/v1/version")).is_ok())
}

/// Returns the CPU time of the manager's thread `name`.
fn cpu_time_of(vgpud: &Vgpud, name: &str) -> Result<Duration> {
    let pid = vgpud.pid().context("The manager has ended")?;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?.path();
        if fs::read_to_string(task.join("comm"))?.trim_end() == name {
            let times = fs::read_to_string(task.join("schedstat"))?;
            let nanoseconds = times.split_whitespace().next().context("no time")?;
            return Ok(Duration::from_nanos(nanoseconds.parse()?));
        }
    }
    // A thread has its name once it runs.
    Ok(Duration::ZERO)
}

/// Fails if the thread that serves administrators works for the requests of `flood`, rather than
/// thread `other`.
fn leaves_administrators_alone(
    vgpud: &Vgpud,
    other: &str,
    flood: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let times = || -> Result<[Duration; 2]> {
        Ok([cpu_time_of(vgpud, "vgpud")?, cpu_time_of(vgpud, other)?])
    };
    let before = times()?;
    flood()?;
    let after = times()?;
    let used = |index: usize| after[index].saturating_sub(before[index]);
    ensure!(used(0) < used(1) / 2, "for administrators {:?}, {other} {:?}", used(0), used(1));
    Ok(())
}

#[test]
fn requests_of_a_reader_are_served_by_another_thread_than_administrators() -> Result<()> {
    const REQUESTS: usize = 400;
    if !nix::unistd::geteuid().is_root() {
        skipped("another user needs root");
        return Ok(());
    }
    let vgpud = Vgpud::start_with(&["--group", "65534"])?;
    let reader = User { uid: 65_534, gid: 65_534, groups: &[] };
    leaves_administrators_alone(&vgpud, "readers", || {
        let mut socket = reader.run(|| Ok(UnixStream::connect(vgpud.api_socket())?))?;
        let request = "GET /v1/version HTTP/1.1\r\nHost: x\r\n\r\n".repeat(REQUESTS - 1);
        let last = "GET /v1/version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        let mut writer = socket.try_clone()?;
        let writes = std::thread::spawn(move || writer.write_all((request + last).as_bytes()));
        let mut answers = String::new();
        socket.read_to_string(&mut answers)?;
        writes.join().map_err(|_| anyhow!("The writer panicked"))??;
        let answers = answers.matches("HTTP/1.1 200").count();
        ensure!(answers == REQUESTS, "{answers} answers");
        Ok(())
    })
}

/// Sends a request to the web console and returns the answer.
fn ask(address: SocketAddr, method: &str, path: &str, headers: &str, body: &str) -> Result<String> {
    let mut socket = TcpStream::connect(address)?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    write!(
        socket,
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Type: application/json\r\n{headers}Content-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Requests a ticket of the web console. Returns the console's address and the ticket.
fn ticket(vgpud: &Vgpud) -> Result<(SocketAddr, String)> {
    let url = vgpud.call("POST", "/v1/web", Some(&json!({})))?["url"].clone();
    let url = url.as_str().and_then(|url| url.strip_prefix("http://")).context("no address")?;
    let (address, ticket) = url.split_once("/#ticket=").context("no ticket")?;
    Ok((address.parse()?, ticket.to_owned()))
}

/// Opens a session of the web console. Returns the console's address, and the session's header.
fn session(vgpud: &Vgpud) -> Result<(SocketAddr, String)> {
    let (address, ticket) = ticket(vgpud)?;
    let body = json!({ "ticket": ticket }).to_string();
    let answer = ask(address, "POST", "/api/enter", "", &body)?;
    let session = answer.split_once("\r\n\r\n").context("no body")?.1;
    let session: Value = serde_json::from_str(session).context("no session")?;
    let secret = session["session"].as_str().context("no secret")?;
    Ok((address, format!("Authorization: Bearer {secret}\r\n")))
}

#[test]
fn local_user_with_many_connections_leaves_room_in_the_web_console() -> Result<()> {
    if !may_open_connections()? {
        return Ok(());
    }
    let vgpud = Vgpud::start_with(&["--web", "127.0.0.1:0"])?;
    let (address, _) = ticket(&vgpud)?;
    let mut held = Vec::new();
    for number in 0..HELD {
        let mut socket = TcpStream::connect(address)?;
        if number % 2 == 0 {
            // An error means that the manager has closed the connection for another.
            let _ = socket.write_all(b"GET / HTTP/1.1\r\nHost: x");
        }
        held.push(socket);
    }
    let (_, bearer) = session(&vgpud)?;
    let answer = ask(address, "GET", "/api/state/0/0", &bearer, "")?;
    ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    ensure!(descriptors(&vgpud)? < MAX_DESCRIPTORS, "{} descriptors", descriptors(&vgpud)?);
    // A session has its share of the places, and is told when it is used up.
    let socket = || -> Result<TcpStream> {
        let mut socket = TcpStream::connect(address)?;
        write!(socket, "GET /api/state/0/0 HTTP/1.1\r\nHost: {address}\r\n{bearer}\r\n")?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        let mut status = [0; 12];
        socket.read_exact(&mut status)?;
        ensure!(&status == b"HTTP/1.1 200", "{}", String::from_utf8_lossy(&status));
        Ok(socket)
    };
    let own: Vec<_> = (0..128).map_while(|_| socket().ok()).collect();
    ensure!((8..100).contains(&own.len()), "{} connections of one session", own.len());
    let answer = ask(address, "GET", "/api/state/0/0", &bearer, "")?;
    let refusal = "This session has too many connections; close some screens";
    ensure!(answer.starts_with("HTTP/1.1 503") && answer.contains(refusal), "{answer}");
    let (_, other) = session(&vgpud)?;
    let answer = ask(address, "GET", "/api/state/0/0", &other, "")?;
    ensure!(answer.starts_with("HTTP/1.1 200"), "another session: {answer}");
    drop(own);
    let long = format!("X: {}\r\n", "a".repeat(1 << 20));
    let answer = ask(address, "GET", "/", &long, "").unwrap_or_default();
    ensure!(!answer.starts_with("HTTP/1.1 200"), "a header of 1 MiB");
    drop(held);
    Ok(())
}

#[test]
fn without_a_session_a_connection_to_the_console_has_one_request() -> Result<()> {
    let vgpud = Vgpud::start_with(&["--web", "127.0.0.1:0"])?;
    let (address, bearer) = session(&vgpud)?;
    let answers = |path: &str, headers: &str| -> Result<usize> {
        let mut socket = TcpStream::connect(address)?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        let head = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n{headers}");
        write!(socket, "{head}\r\n{head}\r\n{head}Connection: close\r\n\r\n")?;
        let mut bytes = Vec::new();
        // The end of a connection with unread requests is an error.
        let _ = socket.read_to_end(&mut bytes);
        Ok(String::from_utf8_lossy(&bytes).matches("HTTP/1.1 200").count())
    };
    let path = "/api/state/0/0";
    ensure!(answers(path, &bearer)? == 3, "with a session");
    leaves_administrators_alone(&vgpud, "console", || {
        for _ in 0..100 {
            let answers = answers("/icon.svg", "")?;
            ensure!(answers == 1, "without a session: {answers}");
        }
        Ok(())
    })
}

#[test]
fn port_of_the_console_that_another_program_has_does_not_keep_vgpud_from_starting() -> Result<()> {
    let taken = TcpListener::bind("127.0.0.1:0")?;
    let address = taken.local_addr()?.to_string();
    let vgpud = Vgpud::start_with(&["--web", &address])?;
    vgpud.create(&json!({ "mdev_type": "SOFT-256MC", "run": true }))?;
    let refusal = vgpud.refused("POST", "/v1/web", Some(&json!({})))?;
    ensure!(refusal.0 == 503 && refusal.2.contains("cannot listen on"), "{refusal:?}");
    drop(taken);
    wait_for("the console listens", || ticket(&vgpud).is_ok())?;
    let (address, _) = ticket(&vgpud)?;
    ensure!(ask(address, "GET", "/", "", "")?.starts_with("HTTP/1.1 200"));
    Ok(())
}
