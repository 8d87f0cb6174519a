//! Text and JSON formats of mdevctl, for compatibility with programs that parse them.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::{Map, Value, json};
use vgpud_api::{Attribute, ParentTypes, StartPolicy, TypeInfo, Vgpu, VgpuState};

use crate::failure::Failure;

/// Formats a value as indented JSON with a newline at the end.
pub fn pretty(value: &impl serde::Serialize) -> Result<Vec<u8>, Failure> {
    let mut text = serde_json::to_vec_pretty(value).map_err(Failure::output)?;
    text.push(b'\n');
    Ok(text)
}

/// Formats a value byte for byte as mdevctl does, without a newline at the end.
pub fn dump(value: &impl serde::Serialize) -> Result<Vec<u8>, Failure> {
    let mut text = pretty(value)?;
    text.pop();
    Ok(text)
}

/// Groups types by parent, both sorted by name as in mdevctl.
fn sorted(parents: &[ParentTypes]) -> BTreeMap<&str, Vec<&TypeInfo>> {
    let mut all: BTreeMap<&str, Vec<&TypeInfo>> = BTreeMap::new();
    for parent in parents {
        all.entry(&parent.parent).or_default().extend(&parent.types);
    }
    for types in all.values_mut() {
        types.sort_by_key(|info| &info.name);
    }
    all
}

/// Returns a list with one object that has a member per parent; an empty list without parents.
fn by_parent(parents: &BTreeMap<&str, Vec<Value>>) -> Value {
    if parents.is_empty() { json!([]) } else { json!([parents]) }
}

fn named(name: String, value: Value) -> Value {
    Value::Object(Map::from_iter([(name, value)]))
}

/// Returns the output of `types --dumpjson`.
pub fn types_json(parents: &[ParentTypes]) -> Value {
    let one = |info: &TypeInfo| {
        let TypeInfo { name, description, device_api, available_instances, .. } = info;
        named(
            name.clone(),
            json!({
                "available_instances": available_instances,
                "device_api": device_api,
                "name": name,
                "description": description,
            }),
        )
    };
    let parents = sorted(parents).into_iter();
    by_parent(&parents.map(|(name, types)| (name, types.into_iter().map(one).collect())).collect())
}

/// Returns the output of `types`.
pub fn types_text(parents: &[ParentTypes]) -> String {
    let mut text = String::new();
    for (parent, types) in sorted(parents) {
        let _ = writeln!(text, "{parent}");
        for info in types {
            let _ = writeln!(text, "  {}", info.name);
            let _ = writeln!(text, "    Available instances: {}", info.available_instances);
            let _ = writeln!(text, "    Device API: {}", info.device_api);
            let _ = writeln!(text, "    Name: {}", info.name);
            let _ = writeln!(text, "    Description: {}", info.description);
        }
    }
    text
}

/// Returns type and attributes of the definition, or of the running vGPU.
fn shown(vgpu: &Vgpu, defined: bool) -> (&str, &[Attribute]) {
    let live = (vgpu.live_type.as_ref(), vgpu.live_attrs.as_ref());
    match live {
        (Some(mdev_type), Some(attrs)) if !defined => (mdev_type, attrs),
        _ => (&vgpu.mdev_type, &vgpu.attrs),
    }
}

/// Returns the content of a definition file.
fn definition_json(vgpu: &Vgpu, defined: bool) -> Value {
    let (mdev_type, attrs) = shown(vgpu, defined);
    json!({ "mdev_type": mdev_type, "start": start(vgpu.start), "attrs": attrs })
}

/// Returns the output of `list --dumpjson`: the definition file of the vGPU named by uuid, or all
/// vGPUs by parent.
pub fn list_json(vgpus: &[&Vgpu], defined: bool, by_uuid: bool) -> Value {
    if let ([vgpu], true) = (vgpus, by_uuid) {
        return definition_json(vgpu, defined);
    }
    let mut parents = BTreeMap::<_, Vec<_>>::new();
    for vgpu in vgpus {
        let entry = named(vgpu.uuid.to_string(), definition_json(vgpu, defined));
        parents.entry(vgpu.parent.as_str()).or_default().push(entry);
    }
    by_parent(&parents)
}

/// Returns the output of `list`: mdevctl's line per vGPU and, if `verbose`, attributes and details
/// that mdevctl does not have.
pub fn list_text(vgpus: &[&Vgpu], defined: bool, verbose: bool) -> String {
    let mut text = String::new();
    for vgpu in vgpus {
        let Vgpu { uuid, parent, .. } = vgpu;
        let (mdev_type, _) = shown(vgpu, defined);
        let _ = write!(text, "{uuid} {parent} {mdev_type} {}", start(vgpu.start));
        let mut notes = Vec::new();
        let named = vgpu.name.as_ref().map(|name| format!("named {name}"));
        notes.extend(named.as_deref());
        match (defined, vgpu.state) {
            (true, VgpuState::Running) => notes.push("active"),
            (false, _) if vgpu.defined => notes.push("defined"),
            _ => {}
        }
        match vgpu.state {
            VgpuState::Restarting => notes.push("restarting"),
            VgpuState::Failed => notes.push("failed"),
            VgpuState::Running | VgpuState::Stopped => {}
        }
        if vgpu.focus == Some(true) {
            notes.push("on the screen");
        }
        if !notes.is_empty() {
            let _ = write!(text, " ({})", notes.join(", "));
        }
        text.push('\n');
        if verbose {
            details(&mut text, vgpu, defined);
        }
    }
    text
}

fn attributes(text: &mut String, title: &str, attrs: &[Attribute]) {
    if !attrs.is_empty() {
        let _ = writeln!(text, "  {title}:");
    }
    for (index, attr) in attrs.iter().enumerate() {
        let _ = writeln!(text, "    @{{{index}}}: {}", json!(attr));
    }
}

fn details(text: &mut String, vgpu: &Vgpu, defined: bool) {
    let (_, attrs) = shown(vgpu, defined);
    attributes(text, "Attrs", attrs);
    if let Some(live) = vgpu.live_attrs.as_ref().filter(|live| *live != attrs) {
        attributes(text, "In force", live);
    }
    if let Some(reason) = &vgpu.reason {
        let _ = writeln!(text, "  Reason: {reason}");
    }
    if let Some(socket) = &vgpu.socket {
        let _ = writeln!(text, "  Socket: {socket}");
    }
    if let Some(pid) = vgpu.pid {
        let _ = writeln!(text, "  Worker: process {pid}");
    }
    if let Some(vm) = vgpu.vm {
        let name = vgpu.vm_name.as_ref().map(|name| format!("\"{name}\", ")).unwrap_or_default();
        let _ = writeln!(text, "  VM: {name}process {} of user {}", vm.pid, vm.uid);
    }
}

fn start(policy: StartPolicy) -> &'static str {
    match policy {
        StartPolicy::Auto => "auto",
        StartPolicy::Manual => "manual",
    }
}
