//! `save`, `restore` and `resume`: a vGPU's state in a file.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read};
use std::path::Path;

use hyper::Method;
use mdev_core::stream::{Head, IndexedVgpu, Part, StreamError, StreamReader, StreamWriter};
use serde_json::json;
use vgpud_api::{RestoreFile, RestoredVgpu, SaveVgpu};
use vgpud_host::body::BodyReader;

use super::new_file::NewFile;
use crate::cli::{Output, Restore, Resume, Save};
use crate::failure::Failure;
use crate::mdevctl::pretty;
use vgpud_client::{Client, vgpu_path};

/// Buffer of a file that is read or written.
const BUFFER: usize = 1 << 20;

/// Runs `save`.
pub async fn save(client: &Client, args: Save) -> Result<Vec<u8>, Failure> {
    let vgpu = args.vgpu.vgpu()?;
    let request = SaveVgpu { keep_paused: args.keep_paused, ..SaveVgpu::default() };
    let file = NewFile::create(&args.file)?;
    let body = begin_save(client, &vgpu.to_string(), &request).await?;
    let bytes = save_into(vec![(body, None)], file, |_| Ok(())).await?;
    written(&args.file, bytes, args.output)
}

/// Runs `restore`.
pub async fn restore(client: &Client, args: Restore) -> Result<Vec<u8>, Failure> {
    let vgpu = args.vgpu.vgpu()?;
    let path = args.file.clone();
    let found = blocking(move || {
        let file = open_file(&path)?;
        IndexedVgpu::find(&file, 0).map_err(|error| cannot("restore", &path, &error))
    });
    if found.await?.machine {
        let file = args.file.display();
        let message = format!("{file} is a saved VM; `vgpuctl vm restore` restores it");
        return Err(Failure::Usage(message));
    }
    let restored = restore_from(client, &vgpu.to_string(), &args.file, 0).await?;
    args.output.result(&restored)
}

/// Runs `resume`.
pub async fn resume(client: &Client, args: Resume) -> Result<Vec<u8>, Failure> {
    let vgpu = args.vgpu.vgpu()?;
    resume_vgpu(client, vgpu).await?;
    described(client, vgpu, args.output).await
}

/// Continues the work of a paused vGPU.
pub async fn resume_vgpu(client: &Client, vgpu: impl Display) -> Result<(), Failure> {
    Ok(client.request(Method::POST, &format!("{}/resume", vgpu_path(vgpu)), &()).await?)
}

/// Returns the output of a command whose result is a vGPU.
pub async fn described(
    client: &Client,
    vgpu: impl Display,
    output: Output,
) -> Result<Vec<u8>, Failure> {
    match output {
        Output::Text => Ok(Vec::new()),
        Output::Json => pretty(&json!({ "uuid": client.vgpu(vgpu, None).await?.uuid })),
    }
}

/// Returns the output of a command whose result is a file.
pub fn written(file: &Path, bytes: u64, output: Output) -> Result<Vec<u8>, Failure> {
    output.result(&json!({ "file": file, "bytes": bytes }))
}

fn cannot(what: &str, file: &Path, error: &dyn Display) -> Failure {
    Failure::Local(format!("Cannot {what} {}: {error}", file.display()))
}

/// Asks for a vGPU's stream. The vGPU is paused then.
pub async fn begin_save(
    client: &Client,
    vgpu: &str,
    request: &SaveVgpu,
) -> Result<BodyReader, Failure> {
    Ok(client.post_for_stream(&format!("{}/save", vgpu_path(vgpu)), request).await?)
}

/// Writes vGPUs, each with its place in a VM, into a new file; `more` adds to the stream. Returns
/// the length of the file.
pub async fn save_into(
    vgpus: Vec<(BodyReader, Option<u16>)>,
    mut file: NewFile,
    more: impl FnOnce(&mut StreamWriter<BufWriter<&mut NewFile>>) -> Result<(), Failure>
    + Send
    + 'static,
) -> Result<u64, Failure> {
    blocking(move || {
        let name = file.name().to_owned();
        let failed = |error: &dyn Display| cannot("write", &name, error);
        let received = |error: StreamError| {
            Failure::Local(format!("vgpud did not send the whole vGPU: {error}"))
        };
        let mut vgpus = vgpus.into_iter().map(|(body, place)| {
            let (from, head) = StreamReader::new(body).map_err(received)?;
            Ok((from, Head { place, ..head }))
        });
        let first = vgpus.next();
        let (mut from, head) =
            first.unwrap_or_else(|| Err(Failure::Local("The VM has no vGPU".to_owned())))?;
        let to = BufWriter::with_capacity(BUFFER, &mut file);
        let mut to = StreamWriter::new(to, &head).map_err(|error| failed(&error))?;
        loop {
            match from.next_part().map_err(received)? {
                Part::End => {
                    let Some(next) = vgpus.next() else { break };
                    let head;
                    (from, head) = next?;
                    to.next(&head).map_err(|error| failed(&error))?;
                }
                part => to.copy(&part).map_err(|error| failed(&error))?,
            }
        }
        more(&mut to)?;
        to.finish().map_err(|error| failed(&error)).map(drop)?;
        file.finish().map_err(|error| failed(&error))
    })
    .await
}

/// What a file has.
#[derive(Debug)]
pub struct Checked {
    /// Descriptions of the vGPUs.
    pub heads: Vec<Head>,
    /// XML of the VM's libvirt domain; empty for other VMs.
    pub domain: String,
    /// The file has a VM, too.
    pub machine: bool,
}

/// Opens a file with a saved vGPU.
pub fn open(file: &Path) -> Result<(StreamReader<impl Read + use<>>, Head), Failure> {
    let reader = StreamReader::new(BufReader::with_capacity(BUFFER, open_file(file)?));
    reader.map_err(|error| cannot("restore", file, &error))
}

fn open_file(file: &Path) -> Result<File, Failure> {
    File::open(file).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Failure::NotFound(format!("There is no {}", file.display())),
        _ => cannot("read", file, &error),
    })
}

/// Checks all of a file, so that nothing is restored from a damaged one.
pub fn check(file: &Path) -> Result<Checked, Failure> {
    let (mut reader, head) = open(file)?;
    let (mut heads, mut domain, mut machine) = (vec![head], Vec::new(), false);
    loop {
        match reader.next_part().map_err(|error| cannot("restore", file, &error))? {
            Part::Next(head) => heads.push(head),
            Part::Domain(data) => domain.extend_from_slice(data),
            Part::Machine(_) => machine = true,
            Part::End => break,
            Part::State(_) | Part::Guest { .. } | Part::Memory { .. } => {}
        }
    }
    let domain = String::from_utf8(domain).map_err(|error| cannot("restore", file, &error))?;
    Ok(Checked { heads, domain, machine })
}

/// Restores a vGPU from the vGPU of this index in a file. The vGPU is paused then.
pub async fn restore_from(
    client: &Client,
    vgpu: &str,
    file: &Path,
    index: usize,
) -> Result<RestoredVgpu, Failure> {
    let path = format!("{}/restore-file", vgpu_path(vgpu));
    Ok(client.post_with_file(&path, &RestoreFile { index }, open_file(file)?).await?)
}

/// Runs `body` on a thread that may block.
pub async fn blocking<T: Send + 'static>(
    body: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let done = tokio::task::spawn_blocking(body).await;
    done.unwrap_or_else(|error| Err(Failure::Local(error.to_string())))
}
