/* SPDX-License-Identifier: Apache-2.0 */
/* A call of `libattn.torch.attend` that differs from an earlier one in addresses alone, as a
 * function of CPython's stable ABI: one file for all releases of Python from 3.10 on and, since
 * tensors come by DLPack's exchange table, all of torch that have one. `libattn.torch.dense` keeps
 * calls here after it has planned and run them, and makes all others itself. State is protected by
 * the interpreter's lock. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <attn/api.h>
#include <string.h>

/* libattn/torch/call.py takes no other: one more with each change of what functions are given. */
enum { REVISION = 2 };
enum { INPUTS = 3, TENSORS = 4, RANK = 4, CALLS_KEPT = 16 };

/* DLPackExchangeAPI of DLPack 1.3 */
struct exchange {
    uint32_t major, minor;
    void *previous, *allocate, *take, *give;
    int (*view)(void *object, struct attn_tensor *view); /* borrows; 0, or an exception */
    int (*stream)(int32_t device_type, int32_t device_id, void **stream);
};

/* What a tensor must have in common with that of the earlier call. Compared bytewise: no padding.
 */
struct form {
    int64_t shape[RANK], strides[RANK];
    struct attn_device device;
    struct attn_dtype dtype;
    int32_t ndim;
};
ATTN_STATIC_ASSERT(sizeof(struct form) == 80, "struct form without padding");

struct call {
    struct form forms[INPUTS];
    /* A `_Call`, which holds the next seven objects and what the addresses below point to; of the
     * thread that made it. */
    PyObject *owner;
    PyObject *constants; /* a tuple: scale, causal, window, soft_cap, kind */
    PyObject *bound, *planned, *workspace, *indices, *recent, *place, *shape;
    struct attn_tensor *tensors[TENSORS];
    attn_status (*run)(attn_plan *, attn_layer *, const struct attn_step_io *, struct attn_error *);
    attn_plan *plan;
    attn_layer *layer;
    const struct attn_step_io *io;
    struct attn_error *error;
    unsigned long thread;
};

static struct call calls[CALLS_KEPT];
static int num_calls, next_call;
static long generation; /* grows when all calls are forgotten */
static const struct exchange *table;
static PyObject *tensor_type, *refuse_capture, *planned_name, *new_empty_name;

/* False: not a plain tensor of four dimensions. */
static int describe(PyObject *object, struct form *form, void **data)
{
    struct attn_tensor view;
    if ((PyObject *)Py_TYPE(object) != tensor_type || table->view(object, &view) != 0) {
        PyErr_Clear();
        return 0;
    }
    if (view.ndim != RANK || view.shape == NULL || view.strides == NULL) {
        return 0;
    }
    memcpy(form->shape, view.shape, sizeof form->shape);
    memcpy(form->strides, view.strides, sizeof form->strides);
    form->device = view.device;
    form->dtype = view.dtype;
    form->ndim = view.ndim;
    *data = (char *)view.data + view.byte_offset;
    return 1;
}

static int equal(PyObject *constants, PyObject *const *given)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(constants); i++) {
        PyObject *constant = PyTuple_GetItem(constants, i);
        if (constant != given[i] && PyObject_RichCompareBool(constant, given[i], Py_EQ) != 1) {
            PyErr_Clear();
            return 0;
        }
    }
    return 1;
}

static int plans(PyObject *holder, const PyObject *wanted)
{
    PyObject *planned = PyObject_GetAttr(holder, planned_name);
    Py_XDECREF(planned);
    return planned == wanted;
}

/* Whether the plan still is this call's, and layer `index` shares it. */
static int current(const struct call *call, PyObject *index)
{
    void *stream = NULL;
    if (!plans(call->bound, call->planned) || !plans(call->workspace, call->bound) ||
        PySet_Contains(call->indices, index) != 1) {
        PyErr_Clear();
        return 0;
    }
    const struct attn_device device = call->forms[0].device;
    if (device.type != ATTN_DEVICE_CPU && table->stream(device.type, device.id, &stream) != 0) {
        PyErr_Clear();
        return 0;
    }
    return stream == call->io->stream;
}

/* Runs the call into a new tensor; NULL without an exception: it failed, and `dense` finds the
 * reason. */
static PyObject *run_call(const struct call *call, PyObject *q, void *const *inputs)
{
    struct attn_tensor view;
    PyObject *out = PyObject_CallMethodObjArgs(q, new_empty_name, call->shape, NULL);
    if (out == NULL || table->view(out, &view) != 0) {
        Py_XDECREF(out);
        return NULL;
    }
    Py_INCREF(call->place); /* the list takes it */
    PyList_SetItem(call->recent, 0, call->place);
    for (int i = 0; i < INPUTS; i++) {
        call->tensors[i]->data = inputs[i];
    }
    call->tensors[INPUTS]->data = (char *)view.data + view.byte_offset;
    attn_status status;
    Py_BEGIN_ALLOW_THREADS status = call->run(call->plan, call->layer, call->io, call->error);
    Py_END_ALLOW_THREADS if (status != ATTN_OK)
    {
        Py_DECREF(out);
        return NULL;
    }
    return out;
}

/* again(q, k, v, scale, causal, window, soft_cap, kind, index): the output; None: no kept call is
 * like it. */
static PyObject *again(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    struct form forms[INPUTS];
    void *inputs[INPUTS];
    unsigned long thread = PyThread_get_thread_ident();
    PyObject *out = NULL;
    (void)module;
    for (int i = 0; i < INPUTS; i++) {
        if (count != INPUTS + 6 || num_calls == 0 || !describe(given[i], &forms[i], &inputs[i])) {
            Py_RETURN_NONE;
        }
    }
    for (int i = 0; i < num_calls && out == NULL && !PyErr_Occurred(); i++) {
        struct call call = calls[i];
        if (memcmp(call.forms, forms, sizeof forms) != 0 || call.thread != thread) {
            continue;
        }
        /* A comparison may run anything, and other threads may take the call's place. */
        Py_INCREF(call.constants);
        Py_INCREF(call.owner);
        const int same = equal(call.constants, given + INPUTS) && current(&call, given[INPUTS + 5]);
        PyObject *captured = same && forms[0].device.type != ATTN_DEVICE_CPU
                                 ? PyObject_CallMethodObjArgs(call.owner, refuse_capture, NULL)
                                 : NULL;
        if (same && !PyErr_Occurred()) {
            out = run_call(&call, given[0], inputs);
        }
        Py_XDECREF(captured);
        Py_DECREF(call.constants);
        Py_DECREF(call.owner);
        if (same) {
            break;
        }
    }
    if (out == NULL && !PyErr_Occurred()) {
        Py_RETURN_NONE;
    }
    return out;
}

static void drop(struct call *call)
{
    PyObject *owner = call->owner, *constants = call->constants;
    call->owner = call->constants = NULL;
    Py_XDECREF(constants);
    Py_XDECREF(owner);
}

/* keep(generation, q, k, v, constants, owner, (bound, planned, workspace, indices, recent, place,
 * shape), (tensors, run, plan, layer, io, error)), the last addresses; nothing, if all calls were
 * forgotten after `generation` was asked for. */
static PyObject *keep(PyObject *module, PyObject *args)
{
    struct call call = {.thread = PyThread_get_thread_ident()};
    PyObject *inputs[INPUTS];
    unsigned long long t[TENSORS], run, plan, layer, io, error;
    long asked;
    void *ignored;
    (void)module;
    if (!PyArg_ParseTuple(args, "lOOOO!O(OOOO!O!OO)(KKKKKKKKK)", &asked, &inputs[0], &inputs[1],
                          &inputs[2], &PyTuple_Type, &call.constants, &call.owner, &call.bound,
                          &call.planned, &call.workspace, &PySet_Type, &call.indices, &PyList_Type,
                          &call.recent, &call.place, &call.shape, &t[0], &t[1], &t[2], &t[3], &run,
                          &plan, &layer, &io, &error)) {
        return NULL;
    }
    for (int i = 0; i < INPUTS; i++) {
        if (!describe(inputs[i], &call.forms[i], &ignored)) {
            Py_RETURN_NONE;
        }
    }
    for (int i = 0; i < TENSORS; i++) {
        call.tensors[i] = (struct attn_tensor *)(uintptr_t)t[i];
    }
    *(void **)&call.run = (void *)(uintptr_t)run;
    call.plan = (attn_plan *)(uintptr_t)plan;
    call.layer = (attn_layer *)(uintptr_t)layer;
    call.io = (const struct attn_step_io *)(uintptr_t)io;
    call.error = (struct attn_error *)(uintptr_t)error;
    if (asked != generation) { /* last: to describe a tensor may run anything */
        Py_RETURN_NONE;
    }
    Py_INCREF(call.constants);
    Py_INCREF(call.owner);
    struct call replaced = calls[next_call];
    calls[next_call] = call;
    next_call = (next_call + 1) % CALLS_KEPT;
    num_calls = num_calls < CALLS_KEPT ? num_calls + 1 : CALLS_KEPT;
    drop(&replaced); /* last: it may run anything */
    Py_RETURN_NONE;
}

/* forget(thread): keeps no call of the thread, or with 0 of any. */
static PyObject *forget(PyObject *module, PyObject *args)
{
    struct call dropped[CALLS_KEPT];
    unsigned long thread;
    int count = 0, kept = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "k", &thread)) {
        return NULL;
    }
    for (int i = 0; i < num_calls; i++) {
        if (thread == 0 || calls[i].thread == thread) {
            dropped[count++] = calls[i];
        } else {
            calls[kept++] = calls[i];
        }
    }
    memset(calls + kept, 0, (size_t)(CALLS_KEPT - kept) * sizeof *calls);
    if (count > 0) {
        num_calls = kept;
        next_call = kept % CALLS_KEPT;
    }
    generation += thread == 0;
    for (int i = 0; i < count; i++) {
        drop(&dropped[i]);
    }
    Py_RETURN_NONE;
}

/* generation(): for `keep`. */
static PyObject *current_generation(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyLong_FromLong(generation);
}

/* setup(type of tensors, address of its exchange table) */
static PyObject *setup(PyObject *module, PyObject *args)
{
    unsigned long long address;
    PyObject *type, *replaced = tensor_type;
    (void)module;
    if (!PyArg_ParseTuple(args, "OK", &type, &address)) {
        return NULL;
    }
    Py_INCREF(type);
    tensor_type = type;
    table = (const struct exchange *)(uintptr_t)address;
    Py_XDECREF(replaced);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"again", (PyCFunction)(void (*)(void))again, METH_FASTCALL, NULL},
    {"keep", keep, METH_VARARGS, NULL},
    {"forget", forget, METH_VARARGS, NULL},
    {"generation", current_generation, METH_NOARGS, NULL},
    {"setup", setup, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "libattn_call",
                                        .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit_libattn_call(void)
{
    planned_name = PyUnicode_InternFromString("planned");
    new_empty_name = PyUnicode_InternFromString("new_empty");
    refuse_capture = PyUnicode_InternFromString("refuse_capture");
    if (planned_name == NULL || new_empty_name == NULL || refuse_capture == NULL) {
        return NULL;
    }
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "REVISION", REVISION) != 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
