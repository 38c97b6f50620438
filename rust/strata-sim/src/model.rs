//! What a model costs, read off its `config.json`: parameters, FLOPs and bytes of a step, bytes of KV. All layers count
//! as alike: where some are dense and others hold experts, each has the mean. Numbers are of one device of the tensor
//! parallel group.

use crate::error::SimulationError;
use crate::hardware::Hardware;
use serde_json::Value;

/// A model on `tensor_parallel` devices.
#[derive(Clone, Debug)]
pub struct Model {
    /// Layers.
    pub layers: u32,
    /// Parts of a layer's KV: 2, or 1 for a latent.
    pub parts: u32,
    /// Bytes of one token's KV in one layer on one device.
    pub kv_token_bytes: u64,
    /// Parameters of a layer that every token passes.
    layer_parameters: f64,
    /// Parameters of one routed expert, meaned over all layers.
    expert_parameters: f64,
    experts: f64,
    experts_per_token: f64,
    /// Parameters of the output head, and those of the input embedding if they are others.
    head_parameters: f64,
    input_parameters: f64,
    weight_bytes: f64,
    /// FLOPs of a pair of a token and one that it attends to in one layer, in prefill and in decode.
    pair_flops: [f64; 2],
    /// FLOPs per context token of a prefill step in one layer: a latent is brought to full heads.
    context_flops: f64,
}

/// One row of a step.
#[derive(Clone, Copy, Debug)]
pub struct StepRow {
    /// Tokens to compute.
    pub tokens: u64,
    /// Tokens before them.
    pub context: u64,
    /// Whether a token is sampled.
    pub samples: bool,
}

/// Seconds of a step on an idle link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCost {
    /// Before the first layer.
    pub overhead: f64,
    /// Each layer.
    pub layer: f64,
    /// The output head.
    pub head: f64,
}

impl StepCost {
    /// All of it.
    pub fn total(&self, layers: u32) -> f64 {
        self.overhead + self.layer * f64::from(layers) + self.head
    }
}

struct Fields<'a>(&'a Value);

impl Fields<'_> {
    fn get(&self, name: &str) -> Option<f64> {
        self.0.get(name).and_then(Value::as_f64)
    }

    fn need(&self, name: &str) -> Result<f64, SimulationError> {
        let missing =
            || format!("the model's config has no number {name:?}: give a Hugging Face config.json");
        self.get(name).filter(|value| *value > 0.0).ok_or_else(|| SimulationError::config(missing()))
    }
}

/// Bytes of a parameter by its dtype.
fn dtype_bytes(config: &Value) -> Result<f64, SimulationError> {
    let quantized =
        config.get("quantization_config").and_then(|quantization| quantization.get("quant_method"));
    if quantized.and_then(Value::as_str) == Some("fp8") {
        return Ok(1.0);
    }
    let name = config.get("torch_dtype").or(config.get("dtype")).and_then(Value::as_str);
    number_bytes(name.unwrap_or("bfloat16"))
}

/// Bytes of a KV element: caches are kept in 16 bits whatever the weights are, unless the configuration says otherwise.
fn kv_element_bytes(config: &Value) -> Result<f64, SimulationError> {
    number_bytes(config.get("kv_cache_dtype").and_then(Value::as_str).unwrap_or("bfloat16"))
}

fn number_bytes(dtype: &str) -> Result<f64, SimulationError> {
    match dtype {
        "float64" => Ok(8.0),
        "float32" => Ok(4.0),
        "bfloat16" | "float16" => Ok(2.0),
        "float8_e4m3fn" => Ok(1.0),
        other => Err(SimulationError::config(format!("the model's dtype {other:?} is unknown"))),
    }
}

struct Attention {
    parameters: f64,
    parts: u32,
    kv_bytes: f64,
    pair_flops: [f64; 2],
    context_flops: f64,
}

fn attention(fields: &Fields<'_>, devices: f64) -> Result<Attention, SimulationError> {
    let element = kv_element_bytes(fields.0)?;
    let (hidden, heads) = (fields.need("hidden_size")?, fields.need("num_attention_heads")?);
    if let Some(latent) = fields.get("kv_lora_rank") {
        let (nope, rope) = (fields.need("qk_nope_head_dim")?, fields.need("qk_rope_head_dim")?);
        let value = fields.need("v_head_dim")?;
        let query = match fields.get("q_lora_rank") {
            Some(rank) => hidden * rank + rank * heads * (nope + rope),
            None => hidden * heads * (nope + rope),
        };
        let up = latent * heads * (nope + value);
        return Ok(Attention {
            parameters: query + hidden * (latent + rope) + up + heads * value * hidden,
            parts: 1,
            // Every device holds the whole latent.
            kv_bytes: (latent + rope) * element,
            pair_flops: [2.0 * heads * (nope + rope + value), 2.0 * heads * (2.0 * latent + rope)],
            context_flops: 2.0 * up,
        });
    }
    let kv_heads = fields.get("num_key_value_heads").unwrap_or(heads);
    let dim = fields.get("head_dim").unwrap_or(hidden / heads);
    let flops = 4.0 * heads * dim;
    Ok(Attention {
        parameters: 2.0 * hidden * heads * dim + 2.0 * hidden * kv_heads * dim,
        parts: 2,
        // With more devices than heads, heads are held more than once.
        kv_bytes: 2.0 * (kv_heads / devices).max(1.0) * dim * element,
        pair_flops: [flops, flops],
        context_flops: 0.0,
    })
}

impl Model {
    /// Reads a Hugging Face `config.json`.
    pub fn from_config(config: &Value, tensor_parallel: u32) -> Result<Model, SimulationError> {
        let devices = f64::from(tensor_parallel.max(1));
        let fields = Fields(config);
        let (hidden, layers) = (fields.need("hidden_size")?, fields.need("num_hidden_layers")?);
        let attention = attention(&fields, devices)?;
        let mlp = |width: f64| 3.0 * hidden * width;
        let dense = mlp(fields.need("intermediate_size")?);
        let experts = fields.get("n_routed_experts").or(fields.get("num_local_experts")).unwrap_or(0.0);
        let (mut layer_mlp, mut expert) = (dense, 0.0);
        if experts > 0.0 {
            let width = fields.get("moe_intermediate_size").unwrap_or(fields.need("intermediate_size")?);
            let sparse = 1.0 - fields.get("first_k_dense_replace").unwrap_or(0.0) / layers;
            let shared = mlp(width) * fields.get("n_shared_experts").unwrap_or(0.0);
            layer_mlp = dense * (1.0 - sparse) + sparse * (shared + hidden * experts);
            expert = mlp(width) * sparse;
        }
        let vocabulary = fields.need("vocab_size")? * hidden;
        let tied = config.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(false);
        Ok(Model {
            layers: layers as u32,
            parts: attention.parts,
            kv_token_bytes: attention.kv_bytes as u64,
            layer_parameters: (attention.parameters + layer_mlp) / devices,
            expert_parameters: expert / devices,
            experts,
            experts_per_token: fields.get("num_experts_per_tok").unwrap_or(0.0),
            head_parameters: vocabulary / devices,
            input_parameters: if tied { 0.0 } else { vocabulary / devices },
            weight_bytes: dtype_bytes(config)?,
            pair_flops: attention.pair_flops.map(|flops| flops / devices),
            context_flops: attention.context_flops / devices,
        })
    }

    /// Parameters on one device.
    pub fn parameters(&self) -> f64 {
        let layer = self.layer_parameters + self.experts * self.expert_parameters;
        f64::from(self.layers) * layer + self.head_parameters + self.input_parameters
    }

    /// Parameters on one device that one token passes.
    pub fn active_parameters(&self) -> f64 {
        let layer = self.layer_parameters + self.experts_per_token * self.expert_parameters;
        f64::from(self.layers) * layer + self.head_parameters
    }

    /// Bytes of the weights on one device.
    pub fn weights(&self) -> f64 {
        self.parameters() * self.weight_bytes
    }

    /// Bytes of a token's KV in all layers on one device.
    pub fn token_bytes(&self) -> u64 {
        self.kv_token_bytes * u64::from(self.layers)
    }

    /// Experts of a layer that so many tokens pass, if each picks by chance.
    fn experts_touched(&self, tokens: f64) -> f64 {
        if self.experts == 0.0 {
            return 0.0;
        }
        self.experts * (1.0 - (1.0 - self.experts_per_token / self.experts).powf(tokens))
    }

    /// By the roofline: linear layers, attention and the head each take what the slower of arithmetic and memory takes,
    /// or what both take where the hardware does one after the other.
    pub fn step(&self, hardware: &Hardware, rows: &[StepRow], decode: bool) -> StepCost {
        let flops_per_second = hardware.peak_flops * hardware.prefill_efficiency;
        let bytes_per_second = hardware.memory_bandwidth * hardware.decode_efficiency;
        let takes = |flops: f64, bytes: f64| {
            let (computes, reads) = (flops / flops_per_second, bytes / bytes_per_second);
            if hardware.overlaps_reads {
                computes.max(reads)
            } else {
                computes + reads
            }
        };
        let (mut tokens, mut pairs, mut reads, mut context, mut samples) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for row in rows {
            let (new, before) = (row.tokens as f64, row.context as f64);
            tokens += new;
            pairs += new * before + new * (new + 1.0) / 2.0;
            reads += new + before;
            context += before;
            samples += f64::from(u8::from(row.samples));
        }
        let passed = self.layer_parameters + self.experts_per_token * self.expert_parameters;
        let read = self.layer_parameters + self.experts_touched(tokens) * self.expert_parameters;
        let linear = takes(2.0 * tokens * passed, read * self.weight_bytes);
        let (pair, bring) =
            if decode { (self.pair_flops[1], 0.0) } else { (self.pair_flops[0], self.context_flops) };
        let attention = takes(pairs * pair + context * bring, reads * self.kv_token_bytes as f64);
        let head = takes(2.0 * samples * self.head_parameters, self.head_parameters * self.weight_bytes);
        let gather =
            if decode { hardware.decode_gather_bandwidth } else { hardware.prefill_gather_bandwidth };
        let gathers = if gather > 0.0 { context * self.kv_token_bytes as f64 / gather } else { 0.0 };
        StepCost {
            overhead: hardware.step_overhead_s + hardware.row_overhead_s * rows.len() as f64,
            layer: linear + attention + gathers,
            head: if samples > 0.0 { head } else { 0.0 },
        }
    }
}
