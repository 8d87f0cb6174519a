//! `define`, `undefine`, `modify`, `start`, `stop`.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use hyper::Method;
use mdev_core::definition::{self, Attrs, Definition, VgpuRef};
use mdev_core::ids::VgpuId;
use serde_json::json;
use vgpud_api::{
    Attribute, CreateVgpu, ModifyTarget, ModifyVgpu, StartPolicy, StartVgpu, StopVgpu,
    UndefineVgpu, Vgpu,
};

use crate::cli::{Define, Modify, Output, Start, Stop, Undefine};
use crate::failure::Failure;
use crate::mdevctl::pretty;
use vgpud_client::{Client, ClientError, vgpu_path};

/// Runs `define`.
pub async fn define(client: &Client, args: Define) -> Result<Vec<u8>, Failure> {
    let uuid = match args.vgpu.vgpu() {
        Some(VgpuRef::Id(id)) => Some(*id),
        // A transient vGPU, which is made permanent.
        Some(name) => Some(client.vgpu(name, None).await.map_err(new_name)?.uuid),
        None => None,
    };
    let file = args.jsonfile.as_deref().map(read_definition).transpose()?;
    let request = match file {
        Some(definition) => CreateVgpu {
            mdev_type: Some(definition.mdev_type),
            start: policy(definition.start),
            attrs: attributes(definition.attrs.iter()),
            ..CreateVgpu::default()
        },
        None => CreateVgpu {
            mdev_type: args.mdev_type,
            start: if args.auto { StartPolicy::Auto } else { StartPolicy::Manual },
            attrs: attributes(pairs(&args.attrs.pairs())),
            ..CreateVgpu::default()
        },
    };
    let force = args.force;
    let request = CreateVgpu { uuid, parent: args.parent, define: true, force, ..request };
    create(client, request, args.output).await
}

/// Runs `undefine`.
pub async fn undefine(client: &Client, args: Undefine) -> Result<Vec<u8>, Failure> {
    let id = match (args.vgpu.vgpu()?, args.parent.as_deref()) {
        (VgpuRef::Id(id), None) => *id,
        (vgpu, parent) => client.vgpu(vgpu, parent).await?.uuid,
    };
    let request = UndefineVgpu { force: args.force };
    client.request(Method::DELETE, &vgpu_path(id), &request).await?;
    remaining(client, id, args.output).await
}

/// Runs `modify`.
pub async fn modify(client: &Client, args: Modify) -> Result<Vec<u8>, Failure> {
    let change = Edit::new(&args);
    let vgpu = client.vgpu(args.vgpu.vgpu()?, args.parent.as_deref()).await?;
    let target = match (args.live, args.defined) {
        (true, true) => ModifyTarget::Both,
        (true, false) => ModifyTarget::Live,
        (false, _) => ModifyTarget::Defined,
    };
    let running = vgpu.live_type.as_ref().filter(|_| args.live);
    let type_now = running.unwrap_or(&vgpu.mdev_type);
    let request = match args.jsonfile.as_deref().map(read_definition).transpose()? {
        Some(definition) => ModifyVgpu {
            // A running vGPU keeps its type and has no start policy. The file may name both.
            mdev_type: Some(definition.mdev_type).filter(|name| name != type_now),
            start: (target != ModifyTarget::Live).then_some(policy(definition.start)),
            attrs: Some(attributes(definition.attrs.iter())),
            live_attrs: None,
            target,
            force: args.force,
        },
        None => ModifyVgpu {
            mdev_type: args.mdev_type.clone(),
            start: match (args.auto, args.manual) {
                (true, _) => Some(StartPolicy::Auto),
                (_, true) => Some(StartPolicy::Manual),
                _ => None,
            },
            // A live change edits the live attributes, which can differ from the definition.
            attrs: match &vgpu.live_attrs {
                Some(live) if target == ModifyTarget::Live => change.apply(live)?,
                _ => change.apply(&vgpu.attrs)?,
            },
            live_attrs: match &vgpu.live_attrs {
                Some(live) if target == ModifyTarget::Both => change.apply(live)?,
                _ => None,
            },
            target,
            force: args.force,
        },
    };
    client.request(Method::PATCH, &vgpu_path(vgpu.uuid), &request).await?;
    match args.output {
        Output::Json => pretty(&client.vgpu(vgpu.uuid, None).await?),
        Output::Text => Ok(Vec::new()),
    }
}

/// Runs `start`.
pub async fn start(client: &Client, args: Start) -> Result<Vec<u8>, Failure> {
    let attrs = args.attrs.pairs();
    if let Some(asked) = args.vgpu.vgpu()
        && let Some(vgpu) = client.find(asked).await?
    {
        let uuid = vgpu.uuid;
        let check_same = |property: &str, current: &str, asked: &Option<String>| match asked {
            Some(asked) if asked != current => Err(Failure::Usage(format!(
                "vGPU {uuid} has {property} {current}, not {asked}; omit --{property}, or use another uuid"
            ))),
            _ => Ok(()),
        };
        check_same("parent", &vgpu.parent, &args.parent)?;
        check_same("type", &vgpu.mdev_type, &args.mdev_type)?;
        if !attrs.is_empty() {
            return Err(Failure::Usage(format!(
                "vGPU {uuid} exists already; change its attributes with `vgpuctl modify -u {uuid}`"
            )));
        }
        // A file replaces the definition.
        if args.jsonfile.is_none() {
            let path = format!("{}/start", vgpu_path(uuid));
            let owner = args.owner.map(|owner| owner.to_string());
            let vgpu: Vgpu = client.post(&path, &StartVgpu { owner, force: args.force }).await?;
            return args.output.result(&vgpu);
        }
    }
    let file = args.jsonfile.as_deref().map(read_definition).transpose()?;
    let (mdev_type, mut attrs) = match file {
        Some(definition) => (Some(definition.mdev_type), attributes(definition.attrs.iter())),
        None => (args.mdev_type, attributes(pairs(&attrs))),
    };
    if let Some(owner) = args.owner {
        attrs.retain(|attr| !attr.contains_key("owner"));
        attrs.push([("owner".to_owned(), owner.to_string())].into());
    }
    let uuid = match args.vgpu.vgpu() {
        Some(VgpuRef::Id(id)) if mdev_type.is_some() => Some(*id),
        Some(VgpuRef::Name(name)) if mdev_type.is_some() => match client.find(name).await? {
            // The file of the command replaces the definition.
            Some(vgpu) => Some(vgpu.uuid),
            None => return Err(new_name(ClientError::NoVgpu(name.to_string()))),
        },
        Some(asked) => return Err(Failure::no_vgpu(asked)),
        None => None,
    };
    let request = CreateVgpu {
        uuid,
        parent: args.parent,
        mdev_type,
        attrs,
        run: true,
        force: args.force,
        ..CreateVgpu::default()
    };
    create(client, request, args.output).await
}

/// Runs `stop`.
pub async fn stop(client: &Client, args: Stop) -> Result<Vec<u8>, Failure> {
    let id = match args.vgpu.vgpu()? {
        VgpuRef::Id(id) => *id,
        // The name is gone with a transient vGPU.
        name @ VgpuRef::Name(_) => client.vgpu(name, None).await?.uuid,
    };
    let path = format!("{}/stop", vgpu_path(id));
    client.request(Method::POST, &path, &StopVgpu { force: args.force }).await?;
    remaining(client, id, args.output).await
}

/// Returns the output of `stop` and `undefine`: nothing as text; as JSON the remaining vGPU, or
/// null.
async fn remaining(client: &Client, uuid: VgpuId, output: Output) -> Result<Vec<u8>, Failure> {
    match output {
        Output::Json => {
            let vgpu = client.find(uuid).await?;
            pretty(&json!({ "uuid": uuid, "vgpu": vgpu }))
        }
        Output::Text => Ok(Vec::new()),
    }
}

/// Refuses `start-parent-mdevs`.
pub fn start_parent_mdevs() -> Result<Vec<u8>, Failure> {
    Err(Failure::Unsupported(
        "vgpud itself starts vGPUs that are defined with --auto; remove mdevctl's udev rule",
    ))
}

/// Creates a vGPU. Prints the uuid if it was generated.
async fn create(client: &Client, request: CreateVgpu, output: Output) -> Result<Vec<u8>, Failure> {
    let vgpu: Vgpu = client.post("/v1/vgpus", &request).await?;
    if output == Output::Json {
        return pretty(&vgpu);
    }
    Ok(if request.uuid.is_none() { uuid_line(vgpu.uuid) } else { Vec::new() })
}

fn uuid_line(uuid: VgpuId) -> Vec<u8> {
    format!("{uuid}\n").into_bytes()
}

/// Adds to the failure for an unknown name how a new vGPU gets that name.
fn new_name(error: ClientError) -> Failure {
    match error {
        ClientError::NoVgpu(name) => Failure::NotFound(format!(
            "There is no vGPU {name}; to give a new vGPU that name, write --name {name}"
        )),
        other => other.into(),
    }
}

/// Change of attributes by `modify`.
struct Edit<'a> {
    args: &'a Modify,
    set: Vec<(String, String)>,
}

impl<'a> Edit<'a> {
    fn new(args: &'a Modify) -> Self {
        Self { args, set: args.attrs.pairs() }
    }

    /// Returns the changed attributes, or `None` without changes.
    fn apply(&self, list: &[Attribute]) -> Result<Option<Vec<Attribute>>, Failure> {
        let Self { args, set } = self;
        if args.addattr.is_none() && !args.delattr && set.is_empty() {
            return Ok(None);
        }
        let mut attrs: Attrs = list.iter().flatten().map(|(n, v)| (n.clone(), v.clone())).collect();
        let edited = match (&args.addattr, &args.value) {
            (Some(name), Some(value)) => attrs.insert(args.index, name.clone(), value.clone()),
            _ if args.delattr => attrs.remove(args.index),
            _ => {
                for (name, value) in set {
                    attrs.set(name, value);
                }
                Ok(())
            }
        };
        edited.map_err(|error| Failure::Usage(error.to_string()))?;
        Ok(Some(attributes(attrs.iter())))
    }
}

pub(super) fn attributes<'a>(attrs: impl Iterator<Item = (&'a str, &'a str)>) -> Vec<Attribute> {
    attrs.map(|(name, value)| [(name.to_owned(), value.to_owned())].into()).collect()
}

fn pairs(attrs: &[(String, String)]) -> impl Iterator<Item = (&str, &str)> {
    attrs.iter().map(|(name, value)| (name.as_str(), value.as_str()))
}

pub(super) fn policy(start: definition::Start) -> StartPolicy {
    match start {
        definition::Start::Auto => StartPolicy::Auto,
        definition::Start::Manual => StartPolicy::Manual,
    }
}

/// Reads a definition from a file or the standard input.
fn read_definition(path: &Path) -> Result<Definition, Failure> {
    let limit = Definition::MAX_BYTES as u64 + 1;
    let mut text = Vec::new();
    let read = if path == Path::new("-") {
        io::stdin().lock().take(limit).read_to_end(&mut text)
    } else {
        File::open(path).and_then(|file| file.take(limit).read_to_end(&mut text))
    };
    read.map_err(|error| Failure::Local(format!("Cannot read {}: {error}", path.display())))?;
    Definition::from_json(&text)
        .map_err(|error| Failure::Usage(format!("{}: {error}", path.display())))
}
