// For programs without Torch, which link a backend library and call it with raw pointers: the class Backend, and the
// params of every op with them.
#pragma once

#include "core/attention.h"
#include "core/best_first.h"
#include "core/drafting.h"
#include "core/kv_cache.h"
#include "core/logprobs.h"
#include "core/ngram.h"
#include "core/ops.h"
#include "core/recurrent.h"
#include "core/sampling.h"
#include "core/select_nodes.h"
#include "core/shard_distributions.h"
#include "core/step.h"
#include "core/tree.h"
#include "core/verify/rules.h"
