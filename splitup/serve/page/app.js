var G=globalThis,Q=G.ShadowRoot&&(G.ShadyCSS===void 0||G.ShadyCSS.nativeShadow)&&"adoptedStyleSheets"in Document.prototype&&"replace"in CSSStyleSheet.prototype,Ue=Symbol(),Oe=new WeakMap,J=class{constructor(e,t,s){if(this._$cssResult$=!0,s!==Ue)throw Error("CSSResult is not constructable. Use `unsafeCSS` or `css` instead.");this.cssText=e,this.t=t}get styleSheet(){let e=this.o,t=this.t;if(Q&&e===void 0){let s=t!==void 0&&t.length===1;s&&(e=Oe.get(t)),e===void 0&&((this.o=e=new CSSStyleSheet).replaceSync(this.cssText),s&&Oe.set(t,e))}return e}toString(){return this.cssText}},Ne=r=>new J(typeof r=="string"?r:r+"",void 0,Ue);var He=(r,e)=>{if(Q)r.adoptedStyleSheets=e.map(t=>t instanceof CSSStyleSheet?t:t.styleSheet);else for(let t of e){let s=document.createElement("style"),n=G.litNonce;n!==void 0&&s.setAttribute("nonce",n),s.textContent=t.cssText,r.appendChild(s)}},se=Q?r=>r:r=>r instanceof CSSStyleSheet?(e=>{let t="";for(let s of e.cssRules)t+=s.cssText;return Ne(t)})(r):r;var{is:dt,defineProperty:ct,getOwnPropertyDescriptor:ht,getOwnPropertyNames:ut,getOwnPropertySymbols:pt,getPrototypeOf:mt}=Object,Y=globalThis,Le=Y.trustedTypes,$t=Le?Le.emptyScript:"",bt=Y.reactiveElementPolyfillSupport,B=(r,e)=>r,re={toAttribute(r,e){switch(e){case Boolean:r=r?$t:null;break;case Object:case Array:r=r==null?r:JSON.stringify(r)}return r},fromAttribute(r,e){let t=r;switch(e){case Boolean:t=r!==null;break;case Number:t=r===null?null:Number(r);break;case Object:case Array:try{t=JSON.parse(r)}catch{t=null}}return t}},De=(r,e)=>!dt(r,e),qe={attribute:!0,type:String,converter:re,reflect:!1,useDefault:!1,hasChanged:De};Symbol.metadata??=Symbol("metadata"),Y.litPropertyMetadata??=new WeakMap;var S=class extends HTMLElement{static addInitializer(e){this._$Ei(),(this.l??=[]).push(e)}static get observedAttributes(){return this.finalize(),this._$Eh&&[...this._$Eh.keys()]}static createProperty(e,t=qe){if(t.state&&(t.attribute=!1),this._$Ei(),this.prototype.hasOwnProperty(e)&&((t=Object.create(t)).wrapped=!0),this.elementProperties.set(e,t),!t.noAccessor){let s=Symbol(),n=this.getPropertyDescriptor(e,s,t);n!==void 0&&ct(this.prototype,e,n)}}static getPropertyDescriptor(e,t,s){let{get:n,set:o}=ht(this.prototype,e)??{get(){return this[t]},set(l){this[t]=l}};return{get:n,set(l){let c=n?.call(this);o?.call(this,l),this.requestUpdate(e,c,s)},configurable:!0,enumerable:!0}}static getPropertyOptions(e){return this.elementProperties.get(e)??qe}static _$Ei(){if(this.hasOwnProperty(B("elementProperties")))return;let e=mt(this);e.finalize(),e.l!==void 0&&(this.l=[...e.l]),this.elementProperties=new Map(e.elementProperties)}static finalize(){if(this.hasOwnProperty(B("finalized")))return;if(this.finalized=!0,this._$Ei(),this.hasOwnProperty(B("properties"))){let t=this.properties,s=[...ut(t),...pt(t)];for(let n of s)this.createProperty(n,t[n])}let e=this[Symbol.metadata];if(e!==null){let t=litPropertyMetadata.get(e);if(t!==void 0)for(let[s,n]of t)this.elementProperties.set(s,n)}this._$Eh=new Map;for(let[t,s]of this.elementProperties){let n=this._$Eu(t,s);n!==void 0&&this._$Eh.set(n,t)}this.elementStyles=this.finalizeStyles(this.styles)}static finalizeStyles(e){let t=[];if(Array.isArray(e)){let s=new Set(e.flat(1/0).reverse());for(let n of s)t.unshift(se(n))}else e!==void 0&&t.push(se(e));return t}static _$Eu(e,t){let s=t.attribute;return s===!1?void 0:typeof s=="string"?s:typeof e=="string"?e.toLowerCase():void 0}constructor(){super(),this._$Ep=void 0,this.isUpdatePending=!1,this.hasUpdated=!1,this._$Em=null,this._$Ev()}_$Ev(){this._$ES=new Promise(e=>this.enableUpdating=e),this._$AL=new Map,this._$E_(),this.requestUpdate(),this.constructor.l?.forEach(e=>e(this))}addController(e){(this._$EO??=new Set).add(e),this.renderRoot!==void 0&&this.isConnected&&e.hostConnected?.()}removeController(e){this._$EO?.delete(e)}_$E_(){let e=new Map,t=this.constructor.elementProperties;for(let s of t.keys())this.hasOwnProperty(s)&&(e.set(s,this[s]),delete this[s]);e.size>0&&(this._$Ep=e)}createRenderRoot(){let e=this.shadowRoot??this.attachShadow(this.constructor.shadowRootOptions);return He(e,this.constructor.elementStyles),e}connectedCallback(){this.renderRoot??=this.createRenderRoot(),this.enableUpdating(!0),this._$EO?.forEach(e=>e.hostConnected?.())}enableUpdating(e){}disconnectedCallback(){this._$EO?.forEach(e=>e.hostDisconnected?.())}attributeChangedCallback(e,t,s){this._$AK(e,s)}_$ET(e,t){let s=this.constructor.elementProperties.get(e),n=this.constructor._$Eu(e,s);if(n!==void 0&&s.reflect===!0){let o=(s.converter?.toAttribute!==void 0?s.converter:re).toAttribute(t,s.type);this._$Em=e,o==null?this.removeAttribute(n):this.setAttribute(n,o),this._$Em=null}}_$AK(e,t){let s=this.constructor,n=s._$Eh.get(e);if(n!==void 0&&this._$Em!==n){let o=s.getPropertyOptions(n),l=typeof o.converter=="function"?{fromAttribute:o.converter}:o.converter?.fromAttribute!==void 0?o.converter:re;this._$Em=n;let c=l.fromAttribute(t,o.type);this[n]=c??this._$Ej?.get(n)??c,this._$Em=null}}requestUpdate(e,t,s,n=!1,o){if(e!==void 0){let l=this.constructor;if(n===!1&&(o=this[e]),s??=l.getPropertyOptions(e),!((s.hasChanged??De)(o,t)||s.useDefault&&s.reflect&&o===this._$Ej?.get(e)&&!this.hasAttribute(l._$Eu(e,s))))return;this.C(e,t,s)}this.isUpdatePending===!1&&(this._$ES=this._$EP())}C(e,t,{useDefault:s,reflect:n,wrapped:o},l){s&&!(this._$Ej??=new Map).has(e)&&(this._$Ej.set(e,l??t??this[e]),o!==!0||l!==void 0)||(this._$AL.has(e)||(this.hasUpdated||s||(t=void 0),this._$AL.set(e,t)),n===!0&&this._$Em!==e&&(this._$Eq??=new Set).add(e))}async _$EP(){this.isUpdatePending=!0;try{await this._$ES}catch(t){Promise.reject(t)}let e=this.scheduleUpdate();return e!=null&&await e,!this.isUpdatePending}scheduleUpdate(){return this.performUpdate()}performUpdate(){if(!this.isUpdatePending)return;if(!this.hasUpdated){if(this.renderRoot??=this.createRenderRoot(),this._$Ep){for(let[n,o]of this._$Ep)this[n]=o;this._$Ep=void 0}let s=this.constructor.elementProperties;if(s.size>0)for(let[n,o]of s){let{wrapped:l}=o,c=this[n];l!==!0||this._$AL.has(n)||c===void 0||this.C(n,void 0,o,c)}}let e=!1,t=this._$AL;try{e=this.shouldUpdate(t),e?(this.willUpdate(t),this._$EO?.forEach(s=>s.hostUpdate?.()),this.update(t)):this._$EM()}catch(s){throw e=!1,this._$EM(),s}e&&this._$AE(t)}willUpdate(e){}_$AE(e){this._$EO?.forEach(t=>t.hostUpdated?.()),this.hasUpdated||(this.hasUpdated=!0,this.firstUpdated(e)),this.updated(e)}_$EM(){this._$AL=new Map,this.isUpdatePending=!1}get updateComplete(){return this.getUpdateComplete()}getUpdateComplete(){return this._$ES}shouldUpdate(e){return!0}update(e){this._$Eq&&=this._$Eq.forEach(t=>this._$ET(t,this[t])),this._$EM()}updated(e){}firstUpdated(e){}};S.elementStyles=[],S.shadowRootOptions={mode:"open"},S[B("elementProperties")]=new Map,S[B("finalized")]=new Map,bt?.({ReactiveElement:S}),(Y.reactiveElementVersions??=[]).push("2.1.2");var ce=globalThis,Ie=r=>r,X=ce.trustedTypes,Be=X?X.createPolicy("lit-html",{createHTML:r=>r}):void 0,Ve="$lit$",T=`lit$${Math.random().toFixed(9).slice(2)}$`,Ge="?"+T,gt=`<${Ge}>`,O=document,K=()=>O.createComment(""),F=r=>r===null||typeof r!="object"&&typeof r!="function",he=Array.isArray,ft=r=>he(r)||typeof r?.[Symbol.iterator]=="function",ne=`[ 	
\f\r]`,j=/<(?:(!--|\/[^a-zA-Z])|(\/?[a-zA-Z][^>\s]*)|(\/?$))/g,je=/-->/g,Ke=/>/g,M=RegExp(`>|${ne}(?:([^\\s"'>=/]+)(${ne}*=${ne}*(?:[^ 	
\f\r"'\`<>=]|("|')|))|$)`,"g"),Fe=/'/g,ze=/"/g,Je=/^(?:script|style|textarea|title)$/i,ue=r=>(e,...t)=>({_$litType$:r,strings:e,values:t}),i=ue(1),N=ue(2),Pt=ue(3),U=Symbol.for("lit-noChange"),v=Symbol.for("lit-nothing"),We=new WeakMap,P=O.createTreeWalker(O,129);function Qe(r,e){if(!he(r)||!r.hasOwnProperty("raw"))throw Error("invalid template strings array");return Be!==void 0?Be.createHTML(e):e}var vt=(r,e)=>{let t=r.length-1,s=[],n,o=e===2?"<svg>":e===3?"<math>":"",l=j;for(let c=0;c<t;c++){let d=r[c],p,h,a=-1,u=0;for(;u<d.length&&(l.lastIndex=u,h=l.exec(d),h!==null);)u=l.lastIndex,l===j?h[1]==="!--"?l=je:h[1]!==void 0?l=Ke:h[2]!==void 0?(Je.test(h[2])&&(n=RegExp("</"+h[2],"g")),l=M):h[3]!==void 0&&(l=M):l===M?h[0]===">"?(l=n??j,a=-1):h[1]===void 0?a=-2:(a=l.lastIndex-h[2].length,p=h[1],l=h[3]===void 0?M:h[3]==='"'?ze:Fe):l===ze||l===Fe?l=M:l===je||l===Ke?l=j:(l=M,n=void 0);let f=l===M&&r[c+1].startsWith("/>")?" ":"";o+=l===j?d+gt:a>=0?(s.push(p),d.slice(0,a)+Ve+d.slice(a)+T+f):d+T+(a===-2?c:f)}return[Qe(r,o+(r[t]||"<?>")+(e===2?"</svg>":e===3?"</math>":"")),s]},z=class r{constructor({strings:e,_$litType$:t},s){let n;this.parts=[];let o=0,l=0,c=e.length-1,d=this.parts,[p,h]=vt(e,t);if(this.el=r.createElement(p,s),P.currentNode=this.el.content,t===2||t===3){let a=this.el.content.firstChild;a.replaceWith(...a.childNodes)}for(;(n=P.nextNode())!==null&&d.length<c;){if(n.nodeType===1){if(n.hasAttributes())for(let a of n.getAttributeNames())if(a.endsWith(Ve)){let u=h[l++],f=n.getAttribute(a).split(T),m=/([.?@])?(.*)/.exec(u);d.push({type:1,index:o,name:m[2],strings:f,ctor:m[1]==="."?oe:m[1]==="?"?ae:m[1]==="@"?le:q}),n.removeAttribute(a)}else a.startsWith(T)&&(d.push({type:6,index:o}),n.removeAttribute(a));if(Je.test(n.tagName)){let a=n.textContent.split(T),u=a.length-1;if(u>0){n.textContent=X?X.emptyScript:"";for(let f=0;f<u;f++)n.append(a[f],K()),P.nextNode(),d.push({type:2,index:++o});n.append(a[u],K())}}}else if(n.nodeType===8)if(n.data===Ge)d.push({type:2,index:o});else{let a=-1;for(;(a=n.data.indexOf(T,a+1))!==-1;)d.push({type:7,index:o}),a+=T.length-1}o++}}static createElement(e,t){let s=O.createElement("template");return s.innerHTML=e,s}};function L(r,e,t=r,s){if(e===U)return e;let n=s!==void 0?t._$Co?.[s]:t._$Cl,o=F(e)?void 0:e._$litDirective$;return n?.constructor!==o&&(n?._$AO?.(!1),o===void 0?n=void 0:(n=new o(r),n._$AT(r,t,s)),s!==void 0?(t._$Co??=[])[s]=n:t._$Cl=n),n!==void 0&&(e=L(r,n._$AS(r,e.values),n,s)),e}var ie=class{constructor(e,t){this._$AV=[],this._$AN=void 0,this._$AD=e,this._$AM=t}get parentNode(){return this._$AM.parentNode}get _$AU(){return this._$AM._$AU}u(e){let{el:{content:t},parts:s}=this._$AD,n=(e?.creationScope??O).importNode(t,!0);P.currentNode=n;let o=P.nextNode(),l=0,c=0,d=s[0];for(;d!==void 0;){if(l===d.index){let p;d.type===2?p=new W(o,o.nextSibling,this,e):d.type===1?p=new d.ctor(o,d.name,d.strings,this,e):d.type===6&&(p=new de(o,this,e)),this._$AV.push(p),d=s[++c]}l!==d?.index&&(o=P.nextNode(),l++)}return P.currentNode=O,n}p(e){let t=0;for(let s of this._$AV)s!==void 0&&(s.strings!==void 0?(s._$AI(e,s,t),t+=s.strings.length-2):s._$AI(e[t])),t++}},W=class r{get _$AU(){return this._$AM?._$AU??this._$Cv}constructor(e,t,s,n){this.type=2,this._$AH=v,this._$AN=void 0,this._$AA=e,this._$AB=t,this._$AM=s,this.options=n,this._$Cv=n?.isConnected??!0}get parentNode(){let e=this._$AA.parentNode,t=this._$AM;return t!==void 0&&e?.nodeType===11&&(e=t.parentNode),e}get startNode(){return this._$AA}get endNode(){return this._$AB}_$AI(e,t=this){e=L(this,e,t),F(e)?e===v||e==null||e===""?(this._$AH!==v&&this._$AR(),this._$AH=v):e!==this._$AH&&e!==U&&this._(e):e._$litType$!==void 0?this.$(e):e.nodeType!==void 0?this.T(e):ft(e)?this.k(e):this._(e)}O(e){return this._$AA.parentNode.insertBefore(e,this._$AB)}T(e){this._$AH!==e&&(this._$AR(),this._$AH=this.O(e))}_(e){this._$AH!==v&&F(this._$AH)?this._$AA.nextSibling.data=e:this.T(O.createTextNode(e)),this._$AH=e}$(e){let{values:t,_$litType$:s}=e,n=typeof s=="number"?this._$AC(e):(s.el===void 0&&(s.el=z.createElement(Qe(s.h,s.h[0]),this.options)),s);if(this._$AH?._$AD===n)this._$AH.p(t);else{let o=new ie(n,this),l=o.u(this.options);o.p(t),this.T(l),this._$AH=o}}_$AC(e){let t=We.get(e.strings);return t===void 0&&We.set(e.strings,t=new z(e)),t}k(e){he(this._$AH)||(this._$AH=[],this._$AR());let t=this._$AH,s,n=0;for(let o of e)n===t.length?t.push(s=new r(this.O(K()),this.O(K()),this,this.options)):s=t[n],s._$AI(o),n++;n<t.length&&(this._$AR(s&&s._$AB.nextSibling,n),t.length=n)}_$AR(e=this._$AA.nextSibling,t){for(this._$AP?.(!1,!0,t);e!==this._$AB;){let s=Ie(e).nextSibling;Ie(e).remove(),e=s}}setConnected(e){this._$AM===void 0&&(this._$Cv=e,this._$AP?.(e))}},q=class{get tagName(){return this.element.tagName}get _$AU(){return this._$AM._$AU}constructor(e,t,s,n,o){this.type=1,this._$AH=v,this._$AN=void 0,this.element=e,this.name=t,this._$AM=n,this.options=o,s.length>2||s[0]!==""||s[1]!==""?(this._$AH=Array(s.length-1).fill(new String),this.strings=s):this._$AH=v}_$AI(e,t=this,s,n){let o=this.strings,l=!1;if(o===void 0)e=L(this,e,t,0),l=!F(e)||e!==this._$AH&&e!==U,l&&(this._$AH=e);else{let c=e,d,p;for(e=o[0],d=0;d<o.length-1;d++)p=L(this,c[s+d],t,d),p===U&&(p=this._$AH[d]),l||=!F(p)||p!==this._$AH[d],p===v?e=v:e!==v&&(e+=(p??"")+o[d+1]),this._$AH[d]=p}l&&!n&&this.j(e)}j(e){e===v?this.element.removeAttribute(this.name):this.element.setAttribute(this.name,e??"")}},oe=class extends q{constructor(){super(...arguments),this.type=3}j(e){this.element[this.name]=e===v?void 0:e}},ae=class extends q{constructor(){super(...arguments),this.type=4}j(e){this.element.toggleAttribute(this.name,!!e&&e!==v)}},le=class extends q{constructor(e,t,s,n,o){super(e,t,s,n,o),this.type=5}_$AI(e,t=this){if((e=L(this,e,t,0)??v)===U)return;let s=this._$AH,n=e===v&&s!==v||e.capture!==s.capture||e.once!==s.once||e.passive!==s.passive,o=e!==v&&(s===v||n);n&&this.element.removeEventListener(this.name,this,s),o&&this.element.addEventListener(this.name,this,e),this._$AH=e}handleEvent(e){typeof this._$AH=="function"?this._$AH.call(this.options?.host??this.element,e):this._$AH.handleEvent(e)}},de=class{constructor(e,t,s){this.element=e,this.type=6,this._$AN=void 0,this._$AM=t,this.options=s}get _$AU(){return this._$AM._$AU}_$AI(e){L(this,e)}};var yt=ce.litHtmlPolyfillSupport;yt?.(z,W),(ce.litHtmlVersions??=[]).push("3.3.3");var Ye=(r,e,t)=>{let s=t?.renderBefore??e,n=s._$litPart$;if(n===void 0){let o=t?.renderBefore??null;s._$litPart$=n=new W(e.insertBefore(K(),o),o,void 0,t??{})}return n._$AI(r),n};var pe=globalThis,C=class extends S{constructor(){super(...arguments),this.renderOptions={host:this},this._$Do=void 0}createRenderRoot(){let e=super.createRenderRoot();return this.renderOptions.renderBefore??=e.firstChild,e}update(e){let t=this.render();this.hasUpdated||(this.renderOptions.isConnected=this.isConnected),super.update(e),this._$Do=Ye(t,this.renderRoot,this.renderOptions)}connectedCallback(){super.connectedCallback(),this._$Do?.setConnected(!0)}disconnectedCallback(){super.disconnectedCallback(),this._$Do?.setConnected(!1)}render(){return U}};C._$litElement$=!0,C.finalized=!0,pe.litElementHydrateSupport?.({LitElement:C});var _t=pe.litElementPolyfillSupport;_t?.({LitElement:C});(pe.litElementVersions??=[]).push("4.2.2");var w=class extends Error{constructor(t,s){super(t);this.status=s}},D="splitup-api-key";function me(){return sessionStorage.getItem(D)??localStorage.getItem(D)??""}function Xe(r,e){sessionStorage.removeItem(D),localStorage.removeItem(D),r&&(e?localStorage:sessionStorage).setItem(D,r)}function Ze(){return localStorage.getItem(D)!==null}function et(){let r=me();return r?{Authorization:`Bearer ${r}`}:{}}async function tt(r){if(r.ok)return r;let e=`the server answered ${r.status}`;try{e=(await r.json()).error.message??e}catch{}throw new w(e,r.status)}async function Z(r,e){let t;try{t=await fetch(r,{headers:et(),signal:e})}catch(s){throw e?.aborted?s:new w("the server does not answer; is splitup serve still running?",0)}return(await tt(t)).json()}async function*st(r,e,t,s){let n=await tt(await fetch(r,{method:"POST",headers:{"Content-Type":"application/json",...et()},body:JSON.stringify({...e,stream:!0,stream_options:{include_usage:!0}}),signal:t}));s(n.headers.get("x-splitup-execution")??"");let o=n.body.pipeThrough(new TextDecoderStream).getReader(),l="";for(;;){let{value:c,done:d}=await o.read();if(d)return;l+=c;let p=l.split(`

`);l=p.pop();for(let h of p){let a=h.split(`
`).find(m=>m.startsWith("data: "))?.slice(6);if(a===void 0||a==="[DONE]")continue;let u=JSON.parse(a);if(u.error)throw new w(u.error.message,502);let f=u.choices?.[0];yield{text:f?.delta?.content??f?.text??"",finish:f?.finish_reason??null,usage:u.usage??null}}}}function $(r){if(r==null)return"–";let e=r!==0&&Math.abs(r)<1e6?6:2;return`${(r/1e6).toLocaleString("en",{maximumFractionDigits:e})} USDC`}function A(r){let e=["B","kB","MB","GB","TB"],t=0;for(;r>=1e3&&t<e.length-1;)r/=1e3,t+=1;return`${r.toLocaleString("en",{maximumFractionDigits:r<10?1:0})} ${e[t]}`}function k(r){return r>=1e3?`${(r/1e3).toFixed(2)} s`:`${r.toFixed(r<10?2:0)} ms`}function g(r){return r==null?"–":r.toLocaleString("en")}function I(r){return r==null?"–":new Date(r*1e3).toISOString().replace("T"," ").slice(0,19)+" UTC"}function E(r){return r.length>14?`${r.slice(0,8)}…${r.slice(-4)}`:r}function b(r,e,t=""){return e?i`<a class=${t?"":"mono"} href="#/${r}/${e}" title=${e}>${t||E(e)}</a>`:i`–`}function _(r,e){return r?i`<p class="error" role="alert">${r}</p>`:e?i`<p class="quiet" aria-busy="true">Loading …</p>`:null}var rt=8,xt=120;function nt(r){if(!r.length)return i`<p class="quiet">The nodes reported no times.</p>`;let e=[...new Set(r.map(a=>a.node))].sort(),t=[...new Set(r.map(a=>a.task))].sort((a,u)=>a-u),s=new Map(r.map(a=>[a.task,a.label])),n=Math.max(...r.map(a=>a.sent_us),1),[o,l,c]=[168,760,24],d=a=>o+Math.max(0,a)/n*l,p=new Set(r.map(a=>a.step)).size,h=`${p} step${p>1?"s":""} in ${t.length} tasks on ${e.length} nodes, ${k(n/1e3)}`;return i`<figure class="chart">
    <figcaption>${h}</figcaption>
    <div class="scroll" tabindex="0" role="group" aria-label="Timeline">
      <svg viewBox="0 0 ${o+l+10} ${t.length*c+26}" role="img" aria-label=${h}>
        ${t.map((a,u)=>N`
            <text class="label" x="0" y=${u*c+16}>${at(s.get(a)??"",22)}<title>${s.get(a)}</title></text>
            <line class="grid" x1=${o} x2=${o+l} y1=${u*c+c-1} y2=${u*c+c-1}></line>`)}
        ${r.map(a=>{let u=t.indexOf(a.task)*c+4,f=`bar c${e.indexOf(a.node)%rt}`,m=Math.max(1.2,d(a.ended_us)-d(a.started_us));return N`<rect class=${f} x=${d(a.started_us)} y=${u} width=${m} height=${c-9} rx="1.5">
            <title>${`${a.label}, step ${a.step}, node ${E(a.node)}: ${k((a.ended_us-a.started_us)/1e3)}`}</title></rect>`})}
        ${[0,.25,.5,.75,1].map(a=>N`<text class="tick" x=${o+a*l} y=${t.length*c+18}
            text-anchor=${a===1?"end":a===0?"start":"middle"}>${k(a*n/1e3)}</text>`)}
      </svg>
    </div>
    <p class="legend">${e.map((a,u)=>i`<a href="#/accounts/${a}" title=${a}><span class="dot c${u%rt}"></span>${E(a)}</a>`)}</p>
  </figure>`}function it(r){if(!r.length)return null;let e=r.at(-1),t=900,s=`${r.length} tokens in ${k(e)}, the first after ${k(r[0])}`;return i`<figure class="chart">
    <figcaption>As seen from here: ${s}</figcaption>
    <div class="scroll">
      <svg viewBox="0 0 ${t} 20" role="img" aria-label=${s}>
        ${r.map((n,o)=>{let l=o?r[o-1]:0;return N`<rect class=${o?"bar c0":"wait"} x=${l/e*t} y="2" height="16"
            width=${Math.max(1,(n-l)/e*t-1)}><title>${`token ${o+1}: ${k(n-l)}`}</title></rect>`})}
      </svg>
    </div>
  </figure>`}function ot(r,e){if(r.length>xt)return null;let t=r.map(()=>0);for(let[m,x]of e)t[x]=Math.max(t[x],t[m]+1);let s=[],n=t.map(m=>(s[m]=(s[m]??0)+1)-1),o=Math.max(...s),[l,c,d,p]=[132,44,38,14],h=m=>t[m]*(l+d)+2,a=m=>(n[m]+(o-s[t[m]])/2)*(c+p)+2,u=s.length*(l+d)-d+4,f=`${r.length} tasks, ${e.length} edges`;return i`<figure class="chart">
    <div class="scroll" tabindex="0" role="group" aria-label="Graph of tasks">
      <svg class="dag" width=${u} height=${o*(c+p)+4} role="img" aria-label=${f}>
        ${e.map(([m,x])=>{let[Ce,Re,te,Me]=[h(m)+l,a(m)+c/2,h(x),a(x)+c/2],Pe=Math.max((Ce+te)/2,te-d/2);return N`<path class="edge" d="M${Ce} ${Re}C${Pe} ${Re} ${Pe} ${Me} ${te} ${Me}"></path>`})}
        ${r.map((m,x)=>N`<g>
            <title>${`${m.label}: ${A(m.vram_bytes)}, held by ${m.holders} nodes`}</title>
            <rect class=${m.holders?"task":"task missing"} x=${h(x)} y=${a(x)} width=${l} height=${c} rx="6"></rect>
            <text class="name" x=${h(x)+10} y=${a(x)+18}>${at(m.label,16)}</text>
            <text class="tick" x=${h(x)+10} y=${a(x)+34}>${A(m.vram_bytes)} · ${m.holders} nodes</text></g>`)}
      </svg>
    </div>
  </figure>`}function at(r,e){return r.length>e?`${r.slice(0,e-1)}…`:r}var R=class extends C{createRenderRoot(){return this}},y=class extends R{constructor(){super();this.period=5e3;this.timer=0;this.asking=null;this.onVisible=()=>{!document.hidden&&this.period&&this.ask()};this.path="",this.data=null,this.error=""}static{this.properties={path:{},data:{state:!0},error:{state:!0}}}connectedCallback(){super.connectedCallback(),document.addEventListener("visibilitychange",this.onVisible)}disconnectedCallback(){super.disconnectedCallback(),document.removeEventListener("visibilitychange",this.onVisible),this.stop()}willUpdate(t){t.has("path")&&(this.data=null,this.error="",this.ask())}stop(){clearTimeout(this.timer),this.asking?.abort()}async ask(){if(this.stop(),!this.path)return;let t=this.asking=new AbortController;try{let s=await Z(this.path,t.signal);if(t.signal.aborted)return;this.data=s,this.error=""}catch(s){if(t.signal.aborted)return;this.error=s instanceof w?s.message:String(s),s instanceof w&&s.status===401&&this.dispatchEvent(new CustomEvent("key-needed",{bubbles:!0}))}this.period&&!document.hidden&&(this.timer=window.setTimeout(()=>{this.ask()},this.period))}};var $e=class extends y{constructor(){super(...arguments);this.period=0}static{this.properties={...y.properties,brief:{type:Boolean}}}render(){let t=this.data;return t?i`
      ${t.difference?i`<p class="error">This plan is wrong: ${t.difference}</p>`:i`<p><span class="badge good">checked</span> Signed by ${t.signers.length} members; every choice
              follows from the seed.</p>`}
      <div class="scroll"><table>
        <thead><tr><th>Task</th><th>Computed by</th>
          ${this.brief?null:i`<th>Fallbacks</th>`}<th>Verifiable</th></tr></thead>
        <tbody>${t.tasks.map(s=>i`<tr>
            <td>${s.label}</td>
            <td>${b("accounts",s.executor)}</td>
            ${this.brief?null:i`<td>${s.fallbacks.map(n=>i`${b("accounts",n)} `)}</td>`}
            <td>${s.verifiable?"yes":"no"}</td>
          </tr>`)}</tbody>
      </table></div>
      <dl>
        <dt>Root on chain</dt><dd class="mono">${t.root}</dd>
        <dt>Seed</dt><dd class="mono">${t.seed}</dd>
        <dt>List of nodes</dt><dd>number ${t.snapshot}</dd>
      </dl>`:_(this.error,!0)}},be=class extends y{constructor(){super(...arguments);this.period=0}render(){let t=this.data;return t?t.verdicts.length?i`<p>${g(t.verdicts.length)} tasks were drawn after all results were committed.</p>
      <div class="scroll"><table>
        <thead><tr><th>Task</th><th>Verdict</th><th>Recomputed by</th><th>At fault</th></tr></thead>
        <tbody>${t.verdicts.map(s=>i`<tr>
            <td>${s.task}</td>
            <td><span class="badge ${s.outcome==="honest"?"good":"bad"}">${s.outcome}</span></td>
            <td>${s.validators.map(n=>i`${b("accounts",n)} `)}</td>
            <td>${[...s.liars,...s.silent].map(n=>i`${b("accounts",n)} `)}</td>
          </tr>`)}</tbody>
      </table></div>`:i`<p>No task of this execution was drawn.</p>`:_(this.error,!0)}},ge=class extends y{render(){return this.data?this.data.is_known?(this.period=0,nt(this.data.spans)):i`<p class="quiet">Nodes report their times to the client when an execution ends. This one is open, or
      another client's.</p>`:_(this.error,!0)}};function wt(r){return r?i`
    <dl>
      <dt>Closed</dt><dd>${r.status}, ${g(r.steps)} steps</dd>
      <dt>To the nodes</dt><dd>${$(r.paid_micro_usdc)}</dd>
      <dt>Committee's fee</dt><dd>${$(r.fee_micro_usdc)}</dd>
      <dt>Came back</dt><dd>${$(r.refunded_micro_usdc)}</dd>
      <dt>Transaction</dt><dd class="mono">${r.transaction}</dd>
    </dl>
    ${r.payments.length||r.slashes.length?i`<div class="scroll"><table>
          <thead><tr><th>Account</th><th class="number">Amount</th><th>Why</th></tr></thead>
          <tbody>
            ${r.payments.map(e=>i`<tr><td>${b("accounts",e.account)}</td>
                <td class="number">${$(e.amount_micro_usdc)}</td>
                <td>${e.from_slash?"reward out of a slashed stake":"work"}</td></tr>`)}
            ${r.slashes.map(([e,t])=>i`<tr><td>${b("accounts",e)}</td>
                <td class="number bad">−${$(t)}</td><td>slashed</td></tr>`)}
          </tbody>
        </table></div>`:null}`:i`<p class="quiet">Not settled yet. An execution that serves a chat stays open for further requests; it
      is paid when it ends.</p>`}var fe=class extends y{static{this.properties={...y.properties,execution:{},firstStep:{type:Number},brief:{type:Boolean}}}constructor(){super(),this.execution="",this.firstStep=0,this.brief=!1}willUpdate(e){e.has("execution")&&(e.set("path",this.path),this.path=`/explorer/v1/executions/${this.execution}`),super.willUpdate(e)}render(){let e=this.data;if(!e)return _(this.error,!0);let t=`/explorer/v1/executions/${this.execution}`;return i`
      ${this.brief?null:i`<h1>Execution <span class="mono">${E(e.id)}</span></h1>`}
      <dl>
        <dt>Execution</dt><dd class="mono">${this.brief?b("executions",e.id):e.id}</dd>
        <dt>State</dt><dd><span class="badge ${ve(e.state)}">${e.state}</span></dd>
        ${this.brief?null:i`<dt>Model</dt><dd>${b("models",e.model_id,e.model)}</dd>
              <dt>Client</dt><dd>${b("accounts",e.client)}</dd>
              <dt>Requested</dt><dd>${I(e.time)}, block ${e.block}</dd>
              <dt>Steps</dt><dd>at most ${g(e.steps)}, for at most ${$(e.max_price)}</dd>
              <dt>Deadline</dt><dd>${I(e.deadline)}</dd>`}
      </dl>
      <h2>Plan</h2>
      ${e.plan_root?i`<plan-view ?brief=${this.brief} .path=${`${t}/plan`}></plan-view>`:i`<p class="quiet">Not planned yet.</p>`}
      <h2>Timeline</h2>
      <timeline-view .path=${`${t}/timeline?start=${this.firstStep}`}></timeline-view>
      <h2>Verification</h2>
      ${e.receipt?.status==="settled"?i`<verification-view .path=${`${t}/verification`}></verification-view>`:i`<p class="quiet">${e.receipt?"It was refunded: nothing was verified.":"It comes with the settlement."}</p>`}
      <h2>Receipt</h2>
      ${wt(e.receipt)}
      ${this.brief?null:i`<h2>Stakes at risk</h2>
            ${e.exposures.length?i`<div class="scroll"><table><thead><tr><th>Node</th><th class="number">Locked</th></tr></thead>
                  <tbody>${e.exposures.map(([s,n])=>i`<tr><td>${b("accounts",s)}</td><td class="number">${$(n)}</td></tr>`)}</tbody></table></div>`:i`<p class="quiet">No commitments yet.</p>`}
            <h2>On chain</h2>
            ${ee(e.events)}`}`}};function ve(r){return{settled:"good",refunded:"bad"}[r]??""}function ee(r){return i`<div class="scroll"><table>
    <thead><tr><th>Event</th><th>Time</th><th class="number">Block</th><th>Execution</th><th>Transaction</th></tr></thead>
    <tbody>${r.map(e=>i`<tr>
        <td>${e.name}${e.amount===null?"":i` <span class="quiet">${$(e.amount)}</span>`}</td>
        <td>${I(e.time)}</td>
        <td class="number">${e.block}</td>
        <td>${e.execution?b("executions",e.execution):""}</td>
        <td class="mono" title=${e.transaction}>${E(e.transaction)}</td>
      </tr>`)}</tbody></table></div>`}customElements.define("plan-view",$e);customElements.define("verification-view",be);customElements.define("timeline-view",ge);customElements.define("execution-view",fe);var Et={model:"",mode:"chat",system:"",temperature:.7,top_p:1,max_tokens:"",seed:""},V=class extends R{static{this.properties={models:{state:!0},messages:{state:!0},settings:{state:!0},error:{state:!0},running:{state:!0}}}constructor(){super(),this.models=null,this.messages=[],this.settings={...Et},this.error="",this.running=null}connectedCallback(){super.connectedCallback(),this.load()}async load(){try{let e=await Z("/v1/models");this.models=e.data,this.error="",e.data.some(t=>t.id===this.settings.model)||(this.settings={...this.settings,model:e.data[0]?.id??""})}catch(e){this.error=String(e.message),e instanceof w&&e.status===401&&this.dispatchEvent(new CustomEvent("key-needed",{bubbles:!0}))}}get price(){return this.models?.find(e=>e.id===this.settings.model)?.price_micro_usdc_per_step??0}get cost(){return this.messages.reduce((e,t)=>e+this.costOf(t),0)}costOf(e){return e.usage?.splitup.cost_micro_usdc??e.arrivals.length*this.price}makeBody(){let{model:e,mode:t,system:s,temperature:n,top_p:o,max_tokens:l,seed:c}=this.settings,d=Object.entries({max_tokens:l,seed:c}).filter(([,u])=>u!==""),p={model:e,temperature:n,top_p:o,...Object.fromEntries(d.map(([u,f])=>[u,Number(f)]))},h=this.messages.slice(0,-1).filter(u=>!u.error);if(t==="text")return["/v1/completions",{...p,prompt:h.at(-1).text}];let a=h.map(u=>({role:u.role,content:u.text}));return s&&a.unshift({role:"system",content:s}),["/v1/chat/completions",{...p,messages:a}]}async send(e){e.preventDefault();let t=this.querySelector("#prompt"),s=t.value;if(!s.trim()||this.running)return;t.value="";let n={usage:null,execution:"",arrivals:[],finish:null,error:""},o={...n,role:"assistant",text:""};this.messages=[...this.messages,{...n,role:"user",text:s},o];let l=this.running=new AbortController,c=performance.now();try{let[d,p]=this.makeBody();for await(let h of st(d,p,l.signal,a=>o.execution=a))h.text&&o.arrivals.push(performance.now()-c),o.text+=h.text,o.finish=h.finish??o.finish,o.usage=h.usage??o.usage,this.follow()}catch(d){l.signal.aborted?o.finish="stopped":o.error=d.message,d instanceof w&&d.status===401&&this.dispatchEvent(new CustomEvent("key-needed",{bubbles:!0}))}finally{this.running=null,this.follow(),t.focus()}}follow(){let e=this.querySelector(".messages"),t=e.scrollHeight-e.scrollTop-e.clientHeight<60;this.messages=[...this.messages],t&&this.updateComplete.then(()=>e.scrollTop=e.scrollHeight)}set(e,t){this.settings={...this.settings,[e]:t}}optionalField(e,t,s){return i`<label>${t}
      <input type="number" min="0" placeholder=${s} .value=${this.settings[e]}
        @change=${n=>this.set(e,n.target.value)}></label>`}numberField(e,t,s,n){return i`<label>${t}
      <input type="number" min="0" max=${s} step=${n} .value=${String(this.settings[e])}
        @change=${o=>this.set(e,Number(o.target.value))}></label>`}form(){let{settings:e}=this;return i`
      <label>Model
        <select @change=${t=>this.set("model",t.target.value)}>
          ${this.models?.map(t=>i`<option ?selected=${t.id===e.model} value=${t.id}>${t.id}</option>`)}
        </select></label>
      <label>Form
        <select @change=${t=>this.set("mode",t.target.value)}>
          <option value="chat" ?selected=${e.mode==="chat"}>Conversation</option>
          <option value="text" ?selected=${e.mode==="text"}>Continue one text</option>
        </select></label>
      <label class="wide">System prompt
        <textarea rows="3" ?disabled=${e.mode==="text"} .value=${e.system}
          @change=${t=>this.set("system",t.target.value)}></textarea></label>
      ${this.optionalField("max_tokens","Most tokens",e.mode==="text"?"16":"what fits")}
      ${this.optionalField("seed","Seed","random")}
      ${this.numberField("temperature","Temperature",2,.1)}
      ${this.numberField("top_p","Top p",1,.05)}
      <p class="quiet wide">${$(this.price)} per step</p>`}answer(e){let{usage:t,arrivals:s}=e,n=this.running!==null&&e===this.messages.at(-1),o=s.length>1?(s.at(-1)-s[0])/1e3:0,l=o>0?`${((s.length-1)/o).toFixed(1)} tokens/s`:"";return i`<article class="message assistant">
      <div class="text" aria-busy=${n}>${e.text.trimStart()}${n?i`<span class="cursor"></span>`:null}</div>
      ${e.error?i`<p class="error" role="alert">${e.error}</p>`:null}
      <p class="facts quiet">
        ${[t?`${g(t.completion_tokens)} tokens`:`${s.length} tokens`,`${t?"":"≈ "}${$(this.costOf(e))}`,s.length?`first after ${k(s[0])}`:"",l,{length:"cut at the limit",stopped:"stopped"}[e.finish??""]??""].filter(Boolean).join(" · ")}
      </p>
      ${e.execution&&!n?i`<details @toggle=${()=>this.requestUpdate()}>
              <summary>Who computed this?</summary>
              ${this.proof(e)}
            </details>`:null}
    </article>`}proof(e){let t=e.usage?.splitup,s=t?.executions??[e.execution];return i`${it(e.arrivals)}${s.map((n,o)=>i`<lazy-proof .execution=${n} .firstStep=${o?0:t?.first_step??0}></lazy-proof>`)}`}render(){let e=this.models&&!this.models.length;return i`
      <div class="chat">
        <details class="settings" ?open=${matchMedia("(min-width: 60rem)").matches}>
          <summary>Settings</summary><div class="form">${this.form()}</div>
        </details>
        <section class="talk">
          <div class="messages" role="log" aria-label="Conversation" tabindex="0">
            ${this.error?i`<p class="error" role="alert">${this.error}</p>`:null}
            ${e?i`<p class="quiet">This key may use no model.</p>`:null}
            ${this.messages.length?null:i`<div class="welcome">
              <h1>Ask the network</h1>
              <p class="quiet">Each answer is computed by several nodes, paid from this server's account, and verified.</p></div>`}
            ${this.messages.map(t=>t.role==="user"?i`<article class="message user"><div class="text">${t.text}</div></article>`:this.answer(t))}
          </div>
          <form @submit=${this.send}>
            <textarea id="prompt" rows="2" placeholder="Write a message" aria-label="Message"
              @keydown=${t=>{t.key==="Enter"&&!t.shiftKey&&!t.isComposing&&this.send(t)}}></textarea>
            ${this.running?i`<button type="button" class="stop" @click=${()=>this.running?.abort()}>Stop</button>`:i`<button type="submit" class="primary" ?disabled=${!this.settings.model}>Send</button>`}
          </form>
          <p class="facts quiet">
            <span>Cost so far: <output id="cost">${$(this.cost)}</output></span>
            <button class="plain" ?disabled=${!this.messages.length||this.running!==null}
              @click=${()=>this.messages=[]}>New conversation</button>
          </p>
        </section>
      </div>`}},ye=class extends R{static{this.properties={execution:{},firstStep:{type:Number},isOpen:{state:!0}}}connectedCallback(){super.connectedCallback();let e=this.closest("details");e.addEventListener("toggle",()=>this.isOpen=e.open),this.isOpen=e.open}render(){return this.isOpen?i`<execution-view brief .execution=${this.execution} .firstStep=${this.firstStep}></execution-view>`:null}};customElements.define("lazy-proof",ye);customElements.define("chat-view",V);var H=class extends y{constructor(){super();this.cursor="before";this.base="",this.place=[]}static{this.properties={...y.properties,base:{},place:{state:!0}}}willUpdate(t){if(t.has("base")&&(this.place=[]),t.has("base")||t.has("place")){let s=this.place.at(-1),n=this.base.includes("?")?"&":"?",o=s===void 0?this.base:`${this.base}${n}${this.cursor}=${s}`;o!==this.path&&t.set("path",this.path),this.path=o}super.willUpdate(t)}turner(){let t=this.data?.next;return!this.place.length&&t==null?null:i`<p class="turner">
      <button ?disabled=${!this.place.length} @click=${()=>this.place=this.place.slice(0,-1)}>Newer</button>
      <button ?disabled=${t==null} @click=${()=>this.place=[...this.place,t]}>Older</button>
    </p>`}},_e=class extends H{constructor(){super(...arguments);this.cursor="start";this.search=""}render(){let t=this.data;return i`
      <h1>Live nodes</h1>
      <p><input type="search" placeholder="Address, class, operator or endpoint" aria-label="Filter nodes" .value=${this.search}
        @change=${s=>{this.search=s.target.value,this.base=`/explorer/v1/nodes?search=${encodeURIComponent(this.search)}`}}></p>
      ${_(this.error,!t)}
      ${t?i`<p class="quiet">${g(t.total)} nodes in the committee's list number ${g(t.sequence)}</p>
            <div class="scroll"><table>
              <thead><tr><th>Node</th><th>Operator</th><th>Class</th><th class="number">Tasks</th>
                <th class="number">Free memory</th><th class="number">Queue</th><th class="number">Stake</th><th class="number">Locked</th></tr></thead>
              <tbody>${t.nodes.map(s=>i`<tr>
                  <td>${b("accounts",s.address)}</td>
                  <td>${s.operator===s.address?i`<span class="quiet">itself</span>`:b("accounts",s.operator)}</td>
                  <td class="class" title=${s.class}>${s.class}</td>
                  <td class="number">${s.task_count}</td>
                  <td class="number">${A(s.vram_free_bytes)}</td>
                  <td class="number">${g(s.queue_ms)} ms</td>
                  <td class="number">${$(s.stake)}</td>
                  <td class="number">${$(s.locked)}</td>
                </tr>`)}</tbody></table></div>${this.turner()}`:null}`}},xe=class extends H{render(){let e=this.data;return i`<h1>Models</h1>
      ${_(this.error,!e)}
      ${e?i`<div class="scroll"><table>
              <thead><tr><th>Name</th><th>Id</th><th>Developer</th><th class="number">Tasks</th><th class="number">Memory</th>
                <th class="number">Price per step</th><th class="number">Holders</th></tr></thead>
              <tbody>${e.models.map(t=>i`<tr>
                  <td>${b("models",t.id,t.name)}</td>
                  <td>${b("models",t.id)}</td>
                  <td>${b("accounts",t.developer)}</td>
                  <td class="number">${t.task_count}</td>
                  <td class="number">${A(t.vram_bytes)}</td>
                  <td class="number">${$(t.price_per_step)}</td>
                  <td class="number">${t.least_holders}</td>
                </tr>`)}</tbody></table></div>
              <p class="quiet">Holders: live nodes that hold the task that fewest hold.</p>${this.turner()}`:null}`}},we=class extends y{render(){let e=this.data;return e?i`
      <h1>${e.name} ${e.is_retired?i`<span class="badge bad">retired</span>`:null}</h1>
      <dl>
        <dt>Id</dt><dd class="mono">${e.id}</dd>
        <dt>Developer</dt><dd>${b("accounts",e.developer)}</dd>
        <dt>Price</dt><dd>${$(e.price_per_step)} per step</dd>
        <dt>Memory</dt><dd>${A(e.vram_bytes)} in ${g(e.task_count)} tasks</dd>
        <dt>Executions</dt><dd>${g(e.requests)}, which cost ${$(e.revenue)}</dd>
      </dl>
      <h2>Tasks</h2>
      ${ot(e.tasks,e.edges)}
      <div class="scroll"><table>
        <thead><tr><th>Task</th><th>Id</th><th class="number">Memory</th><th class="number">Operations</th>
          <th class="number">Price per step</th><th class="number">Holders</th></tr></thead>
        <tbody>${e.tasks.map(t=>i`<tr>
            <td>${t.label}</td><td class="mono" title=${t.id}>${E(t.id)}</td>
            <td class="number">${A(t.vram_bytes)}</td><td class="number">${g(t.flops)}</td>
            <td class="number">${$(t.price)}</td>
            <td class="number">${t.holders||i`<span class="badge bad">0</span>`}</td>
          </tr>`)}</tbody></table></div>
      <h2>Executions</h2>
      <executions-view embedded .base=${`/explorer/v1/executions?of=${e.id}`}></executions-view>`:_(this.error,!0)}},Ee=class extends H{static{this.properties={...H.properties,embedded:{type:Boolean}}}render(){let e=this.data;return i`${this.embedded?null:i`<h1>Executions</h1>`}
      ${_(this.error,!e)}
      ${e&&!e.executions.length?i`<p class="quiet">None yet.</p>`:null}
      ${e?.executions.length?i`<div class="scroll"><table>
              <thead><tr><th>Execution</th><th>Requested</th><th>Model</th><th>Client</th><th>State</th>
                <th class="number">Steps</th><th class="number">Locked</th><th class="number">Cost</th></tr></thead>
              <tbody>${e.executions.map(t=>i`<tr>
                  <td>${b("executions",t.id)}</td>
                  <td title="block ${t.block}">${I(t.time)}</td>
                  <td>${b("models",t.model_id,t.model)}</td>
                  <td>${b("accounts",t.client)}</td>
                  <td><span class="badge ${ve(t.state)}">${t.state}</span></td>
                  <td class="number">${g(t.steps)}</td>
                  <td class="number">${$(t.max_price)}</td>
                  <td class="number">${$(t.cost)}</td>
                </tr>`)}</tbody></table></div>${this.turner()}`:null}`}},St={payout:"Earned by work",reward:"Rewards out of slashes",slashed:"Slashed",refund:"Refunded",executor:"Executions computed",client:"Requests, deposits and withdrawals",developer:"Models registered",member:"Committees",operator:"Nodes operated"},Se=class extends H{render(){let e=this.data;if(!e)return _(this.error,!0);let t=e.node;return i`
      <h1>Account <span class="mono">${E(e.address)}</span></h1>
      <dl>
        <dt>Address</dt><dd class="mono">${e.address}</dd>
        ${Object.entries(St).filter(([s])=>s in e.totals).map(([s,n])=>{let o=e.totals[s],l=["payout","reward","slashed","refund"].includes(s);return i`<dt>${n}</dt><dd>${l?i`${$(o.amount)} <span class="quiet">in ${g(o.count)}</span>`:g(o.count)}</dd>`})}
      </dl>
      ${t?i`<h2>Node <span class="badge ${t.live?"good":"bad"}">${t.live?"live":"not live"}</span></h2>
            <dl>
              <dt>Stake</dt><dd>${$(t.stake)}${t.locked?i`, ${$(t.locked)} locked`:null}</dd>
              <dt>Memory</dt><dd>${t.vram_gb} GB offered${t.live?i`, ${A(t.vram_free_bytes)} free`:null}</dd>
              ${t.live?i`<dt>Class</dt><dd>${t.class}</dd>
                    <dt>Operator</dt><dd>${b("accounts",t.operator)}</dd>
                    <dt>Endpoint</dt><dd class="mono">${t.endpoint}</dd>`:null}
            </dl>
            ${t.tasks.length?i`<h2>Tasks in memory</h2><ul class="tasks">${t.tasks.map(s=>i`<li title=${s.id}>${s.model_id?i`${b("models",s.model_id,s.model)} ${s.task}`:i`<span class="mono">${E(s.id)}</span>`}</li>`)}</ul>`:null}`:null}
      <h2>Requests</h2>
      <executions-view embedded .base=${`/explorer/v1/executions?of=${e.address}`}></executions-view>
      <h2>On chain</h2>
      ${ee(e.events)}${this.turner()}`}},Ae=class extends y{render(){let e=this.data;return e?i`<h1>Committee</h1>
      <dl>
        <dt>Configuration</dt><dd>${e.configuration}</dd>
        <dt>Quorum</dt><dd>${e.quorum} of ${e.members.length} members</dd>
        <dt>Epoch</dt><dd>${g(e.epoch)}</dd>
        <dt>List of nodes</dt><dd>number ${g(e.snapshot)}</dd>
        <dt>Latest seed</dt><dd class="mono">${e.seed??"–"}</dd>
        <dt>Group key</dt><dd class="mono">${e.group_key||"none yet"}</dd>
      </dl>
      <div class="scroll"><table>
        <thead><tr><th>Member</th><th>Endpoint</th><th class="number">Bond</th></tr></thead>
        <tbody>${e.members.map(t=>i`<tr><td>${b("accounts",t.address)}</td><td class="mono">${t.endpoint}</td>
            <td class="number">${$(t.bond)}</td></tr>`)}</tbody></table></div>
      <h2>On chain</h2>
      ${ee(e.events)}`:_(this.error,!0)}},ke=class extends y{constructor(){super(...arguments);this.period=0}render(){return i`<h1>Search</h1>
      ${_(this.error,!this.data)}
      ${this.data&&!this.data.results.length?i`<p class="quiet">Nothing begins like this.</p>`:null}
      <ul class="results">${this.data?.results.map(t=>i`<li><span class="badge">${t.kind}</span>
          <a href="#/${t.kind}s/${t.id}">${t.name||i`<span class="mono">${t.id}</span>`}</a></li>`)}</ul>`}};customElements.define("nodes-view",_e);customElements.define("models-view",xe);customElements.define("model-view",we);customElements.define("executions-view",Ee);customElements.define("account-view",Se);customElements.define("committee-view",Ae);customElements.define("search-view",ke);var At=[["chat","Chat"],["nodes","Nodes"],["models","Models"],["executions","Executions"],["committee","Committee"]],Te=class extends R{constructor(){super();this.chat=new V;this.route=lt(),this.needsKey=!1,addEventListener("hashchange",()=>{this.route=lt(),this.updateComplete.then(()=>this.querySelector("main")?.focus())}),this.addEventListener("key-needed",()=>this.needsKey=!0)}static{this.properties={route:{state:!0},needsKey:{state:!0}}}view(){let[t,s=""]=this.route,n="/explorer/v1";switch(t){case"nodes":return i`<nodes-view .base=${`${n}/nodes`}></nodes-view>`;case"models":return s?i`<model-view .path=${`${n}/models/${encodeURIComponent(s)}`}></model-view>`:i`<models-view .base=${`${n}/models`}></models-view>`;case"executions":return s?i`<execution-view .execution=${encodeURIComponent(s)}></execution-view>`:i`<executions-view .base=${`${n}/executions`}></executions-view>`;case"accounts":return i`<account-view .base=${`${n}/accounts/${encodeURIComponent(s)}`}></account-view>`;case"committee":return i`<committee-view .path=${`${n}/committee`}></committee-view>`;case"search":return i`<search-view .path=${`${n}/search?q=${encodeURIComponent(s)}`}></search-view>`;default:return i`${this.chat}`}}search(t){t.preventDefault();let s=t.target.querySelector("input").value.trim();s&&(location.hash=`#/search/${encodeURIComponent(s)}`)}saveKey(t){t.preventDefault();let s=t.target,[n,o]=s.querySelectorAll("input");Xe(n.value.trim(),o.checked),this.needsKey=!1,this.route[0]==="chat"?this.chat.load():location.reload()}keyForm(){return i`<form class="key" @submit=${this.saveKey}>
      <label>API key <input type="password" autocomplete="off" spellcheck="false" placeholder="sk-splitup-…" .value=${me()}></label>
      <label class="check"><input type="checkbox" ?checked=${Ze()}> Remember on this device</label>
      <button class="primary">Use</button>
      <p class="quiet">Without this the key is forgotten with the tab. Create one with: splitup keys new NAME</p>
    </form>`}render(){let[t]=this.route;return i`
      <a class="skip" href="#/${this.route.join("/")}" @click=${s=>{s.preventDefault(),this.querySelector("main").focus()}}>Skip to content</a>
      <header>
        <a class="brand" href="#/chat"><img src="/icon.svg" alt="" width="22" height="22">SplitUp</a>
        <nav aria-label="Sections">${At.map(([s,n])=>i`<a href="#/${s}" aria-current=${s===t?"page":"false"}>${n}</a>`)}</nav>
        <form role="search" @submit=${this.search}>
          <input type="search" placeholder="Address, model or execution" aria-label="Search the network">
        </form>
      </header>
      ${this.needsKey?this.keyForm():null}
      <main tabindex="-1" class=${t==="chat"?"full":""}>${this.view()}</main>`}};function lt(){let r=location.hash.replace(/^#\/?/,"").split("/").filter(Boolean);try{return r.length?r.map(decodeURIComponent):["chat"]}catch{return["chat"]}}customElements.define("splitup-app",Te);
/*! Bundled license information:

@lit/reactive-element/css-tag.js:
  (**
   * @license
   * Copyright 2019 Google LLC
   * SPDX-License-Identifier: BSD-3-Clause
   *)

@lit/reactive-element/reactive-element.js:
lit-html/lit-html.js:
lit-element/lit-element.js:
  (**
   * @license
   * Copyright 2017 Google LLC
   * SPDX-License-Identifier: BSD-3-Clause
   *)

lit-html/is-server.js:
  (**
   * @license
   * Copyright 2022 Google LLC
   * SPDX-License-Identifier: BSD-3-Clause
   *)
*/
