//! `import`: definitions of mdevctl.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use mdev_core::definition::store::SCRIPTS;
use mdev_core::definition::{Attribute as Meaning, Attrs, Definition};
use mdev_core::ids::VgpuId;
use mdev_core::untrusted::message;
use serde::Serialize;
use vgpud_api::{Attribute, CreateVgpu, ParentTypes, StartPolicy, Vgpu};

use super::write::{attributes, policy};
use crate::cli::{Import, Output};
use crate::failure::{Failure, say};
use crate::mdevctl::pretty;
use vgpud_client::{Client, ClientError};

/// Result for one definition file.
#[derive(Debug, Serialize)]
struct ImportEntry {
    file: PathBuf,
    uuid: Option<VgpuId>,
    parent: String,
    mdev_type: Option<String>,
    start: Option<StartPolicy>,
    attrs: Vec<Attribute>,
    dropped: Vec<String>,
    result: Outcome,
    reason: Option<String>,
}

/// Outcome for one definition file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    WouldBeDefined,
    Defined,
    #[serde(rename = "there_already")]
    Exists,
    LeftOut,
}

/// Runs `import`.
pub async fn import(client: &Client, args: Import) -> Result<Vec<u8>, Failure> {
    let types: Vec<ParentTypes> = client.get("/v1/types").await?;
    let existing: Vec<Vgpu> = client.get("/v1/vgpus").await?;
    let mut entries = Vec::new();
    for (parent, file) in files(&args.dir)? {
        let mut entry = plan(&args, &types, (&existing, &entries), parent, file);
        if entry.result == Outcome::WouldBeDefined && args.apply {
            define(client, &mut entry).await?;
        }
        entries.push(entry);
    }
    if args.dir.join(SCRIPTS).is_dir() {
        say(format_args!(
            "note: callout scripts are not imported; copy {} to vgpud's configuration directory",
            args.dir.join(SCRIPTS).display()
        ));
    }
    let text = match args.output {
        Output::Json => pretty(&entries)?,
        Output::Text if entries.is_empty() => {
            let dir = args.dir.display();
            format!("There are no definitions in {dir}: files {dir}/PARENT/UUID\n").into_bytes()
        }
        Output::Text => entries.iter().map(line).collect::<String>().into_bytes(),
    };
    let left_out = entries.iter().filter(|entry| entry.result == Outcome::LeftOut).count();
    if left_out == 0 {
        return Ok(text);
    }
    crate::print(&text)?;
    Err(Failure::LeftOut { left_out, total: entries.len() })
}

/// Returns the definition files with the names of their parents, sorted.
fn files(dir: &Path) -> Result<Vec<(String, PathBuf)>, Failure> {
    let mut files = Vec::new();
    for (name, folder) in names(dir)? {
        if !folder.is_dir() || name == SCRIPTS || name.starts_with('.') {
            continue;
        }
        let found = names(&folder)?.into_iter().filter(|(_, path)| path.is_file());
        files.extend(found.map(|(_, path)| (name.clone(), path)));
    }
    Ok(files)
}

fn names(dir: &Path) -> Result<Vec<(String, PathBuf)>, Failure> {
    let read = fs::read_dir(dir).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let entries = read.map_err(|error| {
        let dir = dir.display();
        match error.kind() {
            io::ErrorKind::NotFound => Failure::NotFound(format!(
                "There is no directory {dir} with definitions of mdevctl; name another: vgpuctl \
                 import DIR"
            )),
            _ => Failure::Local(format!(
                "Cannot read {dir}: {error}; name the directory of mdevctl's definitions"
            )),
        }
    })?;
    let mut names: Vec<_> = entries
        .iter()
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()))
        .collect();
    names.sort();
    Ok(names)
}

/// Returns the planned result for a file, without changing anything.
fn plan(
    args: &Import,
    types: &[ParentTypes],
    taken: (&[Vgpu], &[ImportEntry]),
    parent: String,
    file: PathBuf,
) -> ImportEntry {
    let mapped = |list: &[(String, String)], name: String| {
        list.iter().find(|(old, _)| *old == name).map_or(name, |(_, new)| new.clone())
    };
    let mut entry = ImportEntry {
        uuid: file.file_name().and_then(|name| name.to_str()?.parse().ok()),
        parent: mapped(&args.parent, parent),
        file,
        mdev_type: None,
        start: None,
        attrs: Vec::new(),
        dropped: Vec::new(),
        result: Outcome::LeftOut,
        reason: None,
    };
    match check(args, types, taken, &mut entry, |name| mapped(&args.mdev_type, name)) {
        Ok(result) => entry.result = result,
        Err(reason) => entry.reason = Some(reason),
    }
    entry
}

/// Fills in an entry from its file. `taken` are the existing vGPUs and the entries before this one.
/// Returns the planned outcome, or the reason for leaving it out.
fn check(
    args: &Import,
    types: &[ParentTypes],
    taken: (&[Vgpu], &[ImportEntry]),
    entry: &mut ImportEntry,
    mapped: impl FnOnce(String) -> String,
) -> Result<Outcome, String> {
    let uuid = entry.uuid.ok_or("its name is not a uuid")?;
    let Definition { mdev_type, start, attrs } = read(&entry.file)?;
    let mdev_type = mapped(mdev_type);
    entry.mdev_type = Some(mdev_type.clone());
    entry.start = Some(policy(start));
    let (kept, dropped): (Vec<_>, Vec<_>) =
        attrs.iter().partition(|(name, _)| !args.drop_attrs || Meaning::named(name).is_ok());
    entry.dropped = dropped.iter().map(|(name, _)| (*name).to_owned()).collect();
    entry.attrs = attributes(kept.iter().copied());
    let (existing, before) = taken;
    let mut planned = before.iter().filter(|entry| entry.result != Outcome::LeftOut);
    let on = if let Some(vgpu) = existing.iter().find(|vgpu| vgpu.uuid == uuid) {
        let same = vgpu.defined
            && (&vgpu.parent, &vgpu.mdev_type, &vgpu.attrs, vgpu.start)
                == (&entry.parent, &mdev_type, &entry.attrs, policy(start));
        if same {
            return Ok(Outcome::Exists);
        }
        Some(&vgpu.parent)
    } else {
        planned.clone().find(|other| other.uuid == Some(uuid)).map(|other| &other.parent)
    };
    if let Some(on) = on {
        return Err(format!("another vGPU on parent {on} has this uuid and is not changed"));
    }
    if let Some(name) = attrs.name() {
        let has_name = |vgpu: &&Vgpu| vgpu.name.as_deref() == Some(name.as_str());
        let gets_name = |attr: &Attribute| attr.get("name").is_some_and(|own| own == name.as_str());
        let other = existing.iter().find(has_name).map(|vgpu| vgpu.uuid);
        let other = other.or_else(|| {
            planned.find(|other| other.attrs.iter().any(gets_name)).and_then(|e| e.uuid)
        });
        if let Some(other) = other {
            return Err(format!("vGPU {other} has its name {name}"));
        }
    }
    let parent = &entry.parent;
    let Some(offered) = types.iter().find(|types| types.parent == *parent) else {
        let names: Vec<_> = types.iter().map(|types| types.parent.as_str()).collect();
        let names = names.join(", ");
        return Err(format!("there is no parent {parent}; add --parent {parent}=NEW ({names})"));
    };
    if !offered.types.iter().any(|info| info.name == mdev_type) {
        let names: Vec<_> = offered.types.iter().map(|info| info.name.as_str()).collect();
        let names = names.join(", ");
        return Err(format!(
            "parent {parent} has no type {mdev_type}; add --type {mdev_type}=NEW ({names})"
        ));
    }
    let owned = kept.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let kept: Attrs = owned.collect();
    match kept.settings() {
        Ok(_) => Ok(Outcome::WouldBeDefined),
        Err(error) => {
            Err(format!("{error}; --drop-attrs removes attributes that Tessera does not have"))
        }
    }
}

fn read(file: &Path) -> Result<Definition, String> {
    let mut text = Vec::new();
    File::open(file)
        .and_then(|file| file.take(Definition::MAX_BYTES as u64 + 1).read_to_end(&mut text))
        .map_err(|error| error.to_string())?;
    Definition::from_json(&text).map_err(|error| error.to_string())
}

async fn define(client: &Client, entry: &mut ImportEntry) -> Result<(), Failure> {
    let request = CreateVgpu {
        uuid: entry.uuid,
        parent: Some(entry.parent.clone()),
        mdev_type: entry.mdev_type.clone(),
        start: entry.start.unwrap_or_default(),
        attrs: entry.attrs.clone(),
        define: true,
        ..CreateVgpu::default()
    };
    match client.post::<Vgpu>("/v1/vgpus", &request).await {
        Ok(_) => entry.result = Outcome::Defined,
        // Continue with the other definitions. Other failures, as of the connection, end the
        // import.
        Err(ClientError::Refused(detail)) => {
            entry.result = Outcome::LeftOut;
            entry.reason = Some(detail.message);
        }
        Err(failure) => return Err(failure.into()),
    }
    Ok(())
}

fn line(entry: &ImportEntry) -> String {
    let mut text = match entry.uuid {
        Some(uuid) => uuid.to_string(),
        None => entry.file.display().to_string(),
    };
    let start = match entry.start {
        Some(StartPolicy::Auto) => "auto",
        _ => "manual",
    };
    let _ = write!(text, " {}", entry.parent);
    if let Some(mdev_type) = &entry.mdev_type {
        let _ = write!(text, " {mdev_type} {start}");
    }
    text += match entry.result {
        Outcome::WouldBeDefined => ": would be defined",
        Outcome::Defined => ": defined",
        Outcome::Exists => ": exists already",
        Outcome::LeftOut => ": left out",
    };
    if let Some(reason) = &entry.reason {
        let _ = write!(text, ": {reason}");
    }
    if entry.result != Outcome::LeftOut && !entry.dropped.is_empty() {
        let _ = write!(text, ", without {}", entry.dropped.join(", "));
    }
    message(&text) + "\n"
}
