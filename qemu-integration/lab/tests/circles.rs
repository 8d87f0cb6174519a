//! Modules of a folder form layers: no two of them use each other, directly or through others.
//!
//! `x.rs` and the files in `x/` count as one module, whose files may use each other. The paths in
//! the text tell what a module uses: `super::memory::Memory`, and names that the parent re-exports.
//! Tests do not count.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Modules, and the names that each uses.
type Uses = BTreeMap<String, BTreeSet<String>>;

/// Returns the text of a file without comments and without tests, which are at its end.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect()
}

/// Returns the names that follow `prefix` in a text, one or a list in braces.
fn names_after(text: &str, prefix: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (at, _) in text.match_indices(prefix).filter(|(at, _)| !text[..*at].ends_with("super::")) {
        let path = text[at + prefix.len()..].split(';').next().unwrap_or_default();
        let (list, mut depth) = (path.strip_prefix('{').unwrap_or(path), 0);
        let count = if list.len() < path.len() { usize::MAX } else { 1 };
        for item in list.split(',').take(count) {
            if depth == 0 {
                let is_name = |c: &char| c.is_alphanumeric() || *c == '_';
                names.insert(item.trim().chars().take_while(is_name).collect());
            }
            depth += item.matches('{').count();
            depth = depth.saturating_sub(item.matches('}').count());
        }
    }
    names
}

/// Adds what the modules below a folder use. `module` is the one that the folder belongs to.
fn add_uses(folder: &Path, depth: usize, module: Option<&str>, root: &str, uses: &mut Uses) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
        let module = module.unwrap_or(&stem);
        if path.is_dir() {
            add_uses(&path, depth + 1, Some(module), root, uses);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = code(&path);
            let names = [root, &"super::".repeat(depth)].map(|prefix| names_after(&text, prefix));
            uses.entry(module.to_owned()).or_default().extend(names.into_iter().flatten());
        }
    }
}

/// Returns whether a module uses itself through others.
fn is_in_circle(module: &str, uses: &Uses) -> bool {
    let (mut seen, mut next) = (BTreeSet::new(), vec![module]);
    while let Some(at) = next.pop() {
        let used = uses.get(at).into_iter().flatten().filter(|name| *name != at);
        next.extend(used.filter(|name| seen.insert(*name)).map(String::as_str));
    }
    seen.contains(&module.to_owned())
}

#[test]
fn modules_form_layers() {
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    for (folder, parent, root) in [
        ("vendor-backends/src/nvidia", "vendor-backends/src/nvidia.rs", "crate::nvidia::"),
        ("vfio-user-server/daemon/src", "vfio-user-server/daemon/src/lib.rs", "crate::"),
    ] {
        let (mut uses, parent) = (Uses::new(), code(&tree.join(parent)));
        add_uses(&tree.join(folder), 1, None, root, &mut uses);
        let modules: BTreeSet<String> = uses.keys().cloned().collect();
        assert!(modules.len() > 20, "{folder}: {modules:?}");
        for module in &modules {
            let exported = names_after(&parent, &format!("pub use {module}::"));
            for names in uses.values_mut().filter(|names| !names.is_disjoint(&exported)) {
                names.insert(module.clone());
            }
        }
        let circles: Vec<_> =
            uses.iter().filter(|(module, _)| is_in_circle(module, &uses)).collect();
        assert!(circles.is_empty(), "Modules in circles, and what each uses: {circles:#?}");
    }
}
