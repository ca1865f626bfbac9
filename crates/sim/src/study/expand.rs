// SPDX-License-Identifier: Apache-2.0
//! Expands a table in which any value may be a list.

use serde_json::{Map, Value};

use super::error::StudyError;

/// A list of a study, and its position.
struct Axis {
    path: Vec<String>,
    values: Vec<Value>,
}

/// Every combination of the lists in `table`, in the order of its keys, the last varying fastest. A value
/// at a path of `lists` is a list itself: there only a list of lists is expanded. At most `max`.
pub(super) fn expand(
    table: Map<String, Value>,
    lists: &[&str],
    max: usize,
) -> Result<Vec<Map<String, Value>>, StudyError> {
    let mut axes = Vec::new();
    collect(&table, lists, &mut Vec::new(), &mut axes)?;
    let total = axes
        .iter()
        .try_fold(1_usize, |total, axis| total.checked_mul(axis.values.len()))
        .filter(|total| *total <= max)
        .ok_or(StudyError::TooMany { max })?;
    let mut tables = Vec::with_capacity(total);
    for number in 0..total {
        let mut one = table.clone();
        let mut rest = number;
        for axis in axes.iter().rev() {
            let value = axis.values[rest % axis.values.len()].clone();
            rest /= axis.values.len();
            put(&mut one, &axis.path, value);
        }
        tables.push(one);
    }
    Ok(tables)
}

fn collect(
    table: &Map<String, Value>,
    lists: &[&str],
    path: &mut Vec<String>,
    axes: &mut Vec<Axis>,
) -> Result<(), StudyError> {
    for (key, value) in table {
        path.push(key.clone());
        let name = path.join(".");
        match value {
            Value::Object(inner) => collect(inner, lists, path, axes)?,
            Value::Array(values) => {
                let by_nature = lists.contains(&name.as_str());
                if values.is_empty() && !by_nature {
                    return Err(StudyError::key(
                        name,
                        "the list is empty, so there is nothing to run; a list has at least one value",
                    ));
                }
                let of_lists = !values.is_empty() && values.iter().all(Value::is_array);
                if !by_nature || of_lists {
                    axes.push(Axis {
                        path: path.clone(),
                        values: values.clone(),
                    });
                }
            }
            _ => {}
        }
        path.pop();
    }
    Ok(())
}

/// Puts `value` at `path`, creating missing tables.
pub(super) fn put(table: &mut Map<String, Value>, path: &[String], value: Value) {
    let Some((key, rest)) = path.split_first() else {
        return;
    };
    if rest.is_empty() {
        table.insert(key.clone(), value);
        return;
    }
    let inner = table
        .entry(key.clone())
        .or_insert_with(|| Value::Object(Map::new()));
    if !inner.is_object() {
        *inner = Value::Object(Map::new());
    }
    if let Value::Object(inner) = inner {
        put(inner, rest, value);
    }
}

/// Merges `over` into `ground`: tables key by key, other values by replacement.
pub(super) fn lay(ground: &mut Map<String, Value>, over: Map<String, Value>) {
    for (key, value) in over {
        match (ground.get_mut(&key), value) {
            (Some(Value::Object(under)), Value::Object(value)) => lay(under, value),
            (_, value) => {
                ground.insert(key, value);
            }
        }
    }
}

/// The same table with its keys in the order of `template`, others after them.
pub(super) fn in_order_of(mut table: Map<String, Value>, template: &Value) -> Map<String, Value> {
    let mut ordered = Map::new();
    for (key, inner_template) in template.as_object().into_iter().flatten() {
        if let Some(value) = table.get_mut(key).map(Value::take) {
            table.remove(key);
            let value = match value {
                Value::Object(inner) => Value::Object(in_order_of(inner, inner_template)),
                other => other,
            };
            ordered.insert(key.clone(), value);
        }
    }
    ordered.extend(table);
    ordered
}
